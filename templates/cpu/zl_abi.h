/* The binary interface between a compiled CPU code object and the loader.
 *
 * In: nothing.  Out: the structures that runtime_stub/driver_cpu.py mirrors with ctypes; change one,
 * change the other and raise ZL_ABI_VERSION.  A function of its own is no change: the loader does without zl_trace, zl_probe,
 * zl_exact_groups and zl_decode where an older compiler made none.  Next file: zl_team.h (threads).
 *
 * Every array is row-major and owned by the caller for the duration of the call.  The weights mapping
 * must outlive the engine.  No function ever raises a signal for bad arguments: it returns a code.
 */
#ifndef ZL_ABI_H
#define ZL_ABI_H
#include <stdint.h>

#define ZL_ABI_VERSION 1u

enum zl_status {
  ZL_OK = 0,
  ZL_BAD_ARGUMENT = 1, /* a null pointer or a negative size */
  ZL_OVER_LIMIT = 2,   /* more tokens, sequences, rows or blocks than the artifact was built for */
  ZL_BAD_TOKEN = 3,    /* a token id outside the vocabulary */
  ZL_BAD_BLOCK = 4,    /* a block id outside the KV pool, or a position outside the block table */
  ZL_NO_MEMORY = 5,
  ZL_NO_THREADS = 6,
  ZL_NO_ENTRY = 7, /* the code object has no such entry point */
  ZL_NO_TILES = 8  /* the kernel does not give this process the AMX tile registers that the code uses */
};

typedef struct zl_module_info {
  uint32_t abi_version;
  uint32_t info_bytes; /* sizeof(zl_module_info): lets a newer loader read an older object */
  const char *target;  /* e.g. "zen4" */
  const char *model;
  uint64_t weights_bytes, workspace_bytes, kv_block_bytes;
  int32_t kv_block_size;
  int32_t max_tokens, max_seqs, max_logit_rows; /* limits of one step */
  int32_t vocab_size, hidden_size, n_layers;
  int32_t n_taps;  /* residual-stream taps a step can copy out */
  int32_t n_calls; /* kernel calls of one step (or run), in manifest order */
} zl_module_info;

/* One per logit row. temperature <= 0 is greedy (argmax, lowest id wins ties). top_k <= 0, top_p >= 1,
 * min_p <= 0 and repetition_penalty == 1 switch that filter off. Order: repetition penalty over
 * history[0..n_history), temperature, top_k, top_p, min_p, draw. The draw is a pure function of
 * (seed, draw): the same pair gives the same uniform number on every machine. */
typedef struct zl_sampling {
  float temperature, top_p, min_p, repetition_penalty;
  int32_t top_k, n_history;
  const int32_t *history; /* [n_history] */
  uint64_t seed, draw;
} zl_sampling;

/* A ragged batch. Prefill, decode, chunked prefill, batched decode and verification are all this. */
typedef struct zl_batch {
  int32_t n_tokens;           /* T */
  int32_t n_seqs;             /* S */
  int32_t max_blocks;         /* B: columns of block_table */
  int32_t n_logit_rows;       /* R: may be 0 (a prefill chunk that is not the last) */
  const int32_t *tokens;      /* [T] */
  const int32_t *positions;   /* [T] */
  const int32_t *seq_starts;  /* [S + 1]: rows seq_starts[s] .. seq_starts[s+1] belong to sequence s */
  const int32_t *block_table; /* [S, B]: block id of each run of kv_block_size positions */
  const int32_t *logit_rows;  /* [R]: token rows whose logits are wanted, ascending */
  const zl_sampling *sampling; /* [R] or NULL = greedy */
  int32_t *next;               /* [R] or NULL */
  float *logits;               /* [R, vocab] or NULL */
  float *taps;                 /* [n_taps, T, hidden], of steps with R = T, or NULL */
  uint64_t *call_ns;           /* [n_calls] or NULL: wall time of each call, thread 0 */
} zl_batch;

/* Steps of a batch that only decodes: see zl_decode. */
typedef struct zl_decoding {
  int32_t n_steps; /* at most */
  int32_t n_stops;
  const int32_t *stops; /* [n_stops]: the step that chooses one of these, for any sequence, is the last */
  int32_t *next;        /* [n_steps, R] */
  int32_t n_done;       /* out: steps that were made */
} zl_decoding;

typedef struct zl_create_args {
  const void *weights;
  uint64_t weights_bytes;
  void *kv; /* kv_blocks * kv_block_bytes, 64-byte aligned; NULL when the model has no KV */
  uint64_t kv_blocks;
  void *workspace; /* workspace_bytes, 64-byte aligned */
  uint64_t workspace_bytes;
  int32_t n_threads;
  int32_t n_cpus;      /* 0 = do not pin */
  const int32_t *cpus; /* [n_cpus] */
} zl_create_args;

/* What one thread did from begin_ns to end_ns.  The laps of a thread follow each other without a gap, and all
 * threads have the first begin and the last end in common: those of the step. */
typedef struct zl_lap {
  uint64_t begin_ns, end_ns; /* CLOCK_MONOTONIC */
  int64_t call;              /* the kernel call's number, or one of zl_lap_kind */
  int64_t rows;              /* of the call, over all threads */
} zl_lap;
enum zl_lap_kind { ZL_LAP_WAIT = -1 /* for other threads */, ZL_LAP_SAMPLE = -2 };

/* What the machine reached with this code and the engine's threads.  0: the code has no such instruction. */
typedef struct zl_ceilings {
  double read_memory, read_cache; /* 1e9 bytes a second */
  double f32, bf16, int8;         /* 1e9 operations a second; a multiply-add is two */
} zl_ceilings;

typedef struct zl_engine zl_engine;

const zl_module_info *zl_info(void);
int32_t zl_create(const zl_create_args *args, zl_engine **engine);
int32_t zl_step(zl_engine *engine, const zl_batch *batch);
/* Steps one after the other, each sequence fed what it chose in the one before: the same tokens as from zl_step, without
 * the caller in between.  The batch: of each sequence one token and its logit row, a block table for the last step's
 * positions, no repetition penalty; logits, taps, next and call_ns are NULL.  After an error decoding->next holds the steps
 * before it. */
int32_t zl_decode(zl_engine *engine, const zl_batch *batch, zl_decoding *decoding);
/* inputs / outputs in manifest order; dims[i] is the value of the manifest's i-th symbol */
int32_t zl_run(zl_engine *engine, const void *const *inputs, void *const *outputs, const int64_t *dims,
               int32_t n_dims, uint64_t *call_ns);
/* From now on each step or run writes its laps, laps[n_threads, capacity], and how many each thread had, counts
 * [n_threads]; those past capacity are counted but not written.  laps NULL: no longer.  Not while a step runs. */
int32_t zl_trace(zl_engine *engine, zl_lap *laps, int64_t capacity, int64_t *counts);
/* Measures for some hundred milliseconds.  memory[bytes], 64-byte aligned, is overwritten; it should be several times
 * the last cache, and its first cache_bytes should fit in it: both at least 512 bytes for each thread. */
int32_t zl_probe(zl_engine *engine, void *memory, uint64_t bytes, uint64_t cache_bytes, zl_ceilings *out);
/* Groups of 16 logits that the last step computed: fewer than all where only each row's largest was asked for. */
int64_t zl_exact_groups(zl_engine *engine);
void zl_destroy(zl_engine *engine);

#endif
