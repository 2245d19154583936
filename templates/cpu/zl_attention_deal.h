/* Attention's work split: which thread computes which tile, and where the spans of one context meet.
 *
 * In: zl_attention.h's types, the team's shared memory.  Out: zl_attention_all.  Next file: zl_attention.h.
 *
 * Many tokens: items of tokens x the heads of a KV head, dealt out (zl_deal).  Few tokens (decoding) are fewer items
 * than would keep the threads busy, or as large as contexts are long, so their spans are dealt out too.  Each is kept in
 * a slot of the team's memory; the thread that ends a context's last one merges them, in the order in which one thread
 * would have done it: the same bits.  Where there is one thread, one span, no room or another
 * attention in the same phase that has the slots, heads are shared out instead.
 */
#ifndef ZL_ATTENTION_DEAL_H
#define ZL_ATTENTION_DEAL_H

/* Where a span is kept: its `out`, its maxima, its sums, all in fours of heads; whole lines. */
ZL_KERNEL int64_t zl_slot_bytes(int64_t heads, int64_t hd) {
  return ((heads + 3) / 4 * 4 * ((hd + 15) / 16 * 16 + 2) + 15) / 16 * 64;
}

/* A part is done, `out` of `total` in its slot.  Whoever finds all others there merges them into `total` and leaves the
 * counter 0 for the next call.  0: not all are there yet. */
ZL_KERNEL int zl_meet(const zl_attention_shape *a, const zl_cut *cut, zl_seen *total, zl_seen *part) {
  const int64_t n = cut->heads, elements = (n + 3) / 4 * 4 * ((a->head_dim + 15) / 16 * 16);
  memcpy(total->out + elements, total->max, (size_t)n * 4);
  memcpy(total->out + elements + n, total->sum, (size_t)n * 4);
  if (atomic_fetch_add_explicit(cut->met, 1, memory_order_acq_rel) + 1 < (int32_t)cut->parts) return 0;
  atomic_store_explicit(cut->met, 0, memory_order_relaxed);
  for (int64_t i = 0; i < cut->parts; i++) {
    zl_seen *one = i ? part : total;
    one->out = (float *)(void *)(cut->slots + i * zl_slot_bytes(n, a->head_dim));
    memcpy(one->max, one->out + elements, (size_t)n * 4);
    memcpy(one->sum, one->out + elements + n, (size_t)n * 4);
    if (i) zl_seen_merge(a, total, part, n);
  }
  return 1;
}

/* One tile from queries to results: most of a module's attention code, so it has one caller. */
ZL_KERNEL void zl_attention_one(const zl_task *t, const zl_attention_io *io, const zl_attention_shape *a,
                                const zl_cut *cut) {
  const int64_t hd = a->head_dim;
  _Alignas(64) float out[2][ZL_QUERIES * ZL_MAX_HEAD_DIM];
  zl_seen total, part;
  zl_queries tile;
  total.out = out[0];
  part.out = out[1];
  zl_fill_tile(&tile, t, a, io, cut);
  _Alignas(64) uint32_t pairs[ZL_QUERIES * ZL_MAX_HEAD_DIM / 2];
  for (int64_t i = 0; a->kv_dtype == ZL_KV_Q8_0 && i < tile.n; i++) {
    tile.pairs[i] = pairs + i * (hd / 2);
    tile.unit[i] = zl_query_q8(tile.q[i], a->scale, pairs + i * (hd / 2), hd);
  }
#if defined(__AVX512BF16__)
  for (int64_t i = 0; a->kv_dtype == ZL_KV_BF16 && i < tile.n; i++) {
    tile.pairs[i] = pairs + i * (hd / 2);
    zl_pairs(tile.q[i], zl_query_scale(a), pairs + i * (hd / 2), hd);
  }
  for (int64_t i = tile.n; i % 4; i++) tile.pairs[i] = pairs;
#endif
  if (cut->parts > 1) total.out = (float *)(void *)(cut->slots + cut->part * zl_slot_bytes(cut->heads, hd));
  zl_attend(t, a, &tile, cut, io->k, io->v, &total, &part);
  if (cut->parts > 1 && !zl_meet(a, cut, &total, &part)) return;
  zl_results(io, &total, cut, hd);
}

/* A thread's tiles of a call.  Many tokens: items of tokens x a run of heads, dealt out; an item whose tokens span
 * sequences is several tiles.  Few: spans of a token x a run, dealt out; or the query heads of all tokens in one row, an
 * equal share to each thread, cut where the KV head changes: heads of a group still read K and V together. */
typedef struct zl_tiles {
  int64_t rows, H, group;
  int64_t most, runs; /* heads of a run, at most, all of one KV head; runs of a token */
  int few;
  int64_t parts;      /* most spans of a token, where they are dealt out; else 1 */
  int64_t next, end;  /* in hand: heads, or tokens of an item */
  int64_t tokens;     /* of an item */
  zl_cut cut;         /* in hand */
  zl_deal deal;
} zl_tiles;

/* Tokens of an item at most; fewer if that leaves threads idle, but eights while there are so many: see zl_results. */
ZL_KERNEL int64_t zl_item_tokens(const zl_task *t, const zl_tiles *w) {
  const int64_t room = ZL_QUERIES / w->most;
  int64_t tokens = room > 8 ? room / 8 * 8 : room;
  while (t->n_threads > 1 && tokens > 1 && (w->rows + tokens - 1) / tokens * w->runs < 2 * (int64_t)t->n_threads)
    tokens = tokens > 8 ? tokens - 8 : tokens / 2;
  return tokens;
}

ZL_KERNEL void zl_tiles_runs(zl_tiles *w, int64_t most) {
  w->most = most;
  w->runs = w->H / w->group * ((w->group + most - 1) / most);
}

/* the spans that a query at p attends to */
ZL_KERNEL int64_t zl_spans(const zl_attention_shape *a, int64_t p) {
  return zl_span_of(p) - zl_span_of(zl_first(a, p)) + 1;
}

/* Whether spans are dealt out: contexts have several, all have a slot.  Two items a thread at least, as runs and slots
 * allow. */
ZL_KERNEL void zl_tiles_part(const zl_task *t, zl_tiles *w, const zl_attention_io *io, const zl_attention_shape *a) {
  int64_t parts = 1;
  for (int64_t row = 0; row < w->rows; row++) {
    const int64_t spans = zl_spans(a, io->positions[row]);
    if (spans > parts) parts = spans;
  }
  if (t->n_threads == 1 || parts == 1 || t->deal != 0) return; /* one call of a phase has the slots */
  zl_tiles finer = *w;
  finer.parts = parts;
  for (;;) {
    const int64_t meetings = w->rows * finer.runs;
    if (meetings > ZL_MEETINGS || meetings * parts * zl_slot_bytes(finer.most, a->head_dim) > ZL_SLOTS_BYTES) return;
    *w = finer;
    if (finer.most == 1 || meetings * parts >= 2 * (int64_t)t->n_threads) return;
    zl_tiles_runs(&finer, (finer.most + 1) / 2);
  }
}

ZL_KERNEL zl_tiles zl_tiles_begin(const zl_task *t, int64_t rows, const zl_attention_io *io,
                                  const zl_attention_shape *a) {
  zl_tiles w;
  memset(&w, 0, sizeof w);
  w.rows = rows;
  w.H = io->H;
  w.group = io->group;
  w.parts = w.cut.parts = 1;
  zl_tiles_runs(&w, io->group < ZL_QUERIES ? io->group : ZL_QUERIES);
  w.few = rows * (io->H / io->group) < 4 * (int64_t)t->n_threads;
  if (w.few) {
    zl_share(t, rows * w.H, &w.next, &w.end);
    zl_tiles_part(t, &w, io, a);
    w.deal.n = rows * w.runs * w.parts;
  } else { /* later tokens see longer contexts: the thread whose items are early ends first and helps */
    w.tokens = zl_item_tokens(t, &w);
    w.deal.n = (rows + w.tokens - 1) / w.tokens * w.runs;
  }
  return w;
}

/* The cut's heads: a run's. */
ZL_KERNEL void zl_cut_run(zl_tiles *w, int64_t run) {
  const int64_t of_group = (w->group + w->most - 1) / w->most, skip = run % of_group * w->most;
  w->cut.h0 = run / of_group * w->group + skip;
  w->cut.heads = w->group - skip < w->most ? w->group - skip : w->most;
}

/* Few tokens: a span. */
ZL_KERNEL int zl_next_span(const zl_task *t, zl_tiles *w, const zl_attention_io *io, const zl_attention_shape *a) {
  int64_t item, at; /* at: of (token, run) */
  do {
    if (!zl_deal_item(t, &w->deal, &item)) return 0;
    at = item / w->parts;
    w->cut.t0 = at / w->runs;
    w->cut.part = item % w->parts;
    w->cut.parts = zl_spans(a, io->positions[w->cut.t0]);
  } while (w->cut.part >= w->cut.parts);
  w->cut.t1 = w->cut.t0 + 1;
  zl_cut_run(w, at % w->runs);
  w->cut.met = (_Atomic int32_t *)(void *)(t->shared + at * 64);
  w->cut.slots = t->shared + ZL_MEETINGS * 64 + at * w->parts * zl_slot_bytes(w->most, a->head_dim);
  return 1;
}

/* Few tokens: heads of one token. */
ZL_KERNEL int zl_next_heads(zl_tiles *w) {
  if (w->next == w->end) return 0;
  const int64_t h0 = w->next % w->H, left = w->group - h0 % w->group, share = w->end - w->next;
  w->cut.t0 = w->next / w->H;
  w->cut.t1 = w->cut.t0 + 1;
  w->cut.h0 = h0;
  w->cut.heads = left < share ? left : share;
  if (w->cut.heads > w->most) w->cut.heads = w->most;
  w->next += w->cut.heads;
  return 1;
}

/* Many: tokens of one sequence, of the item in hand or the next one. */
ZL_KERNEL int zl_next_tokens(const zl_task *t, zl_tiles *w) {
  if (w->next == w->end) {
    int64_t item;
    if (!zl_deal_item(t, &w->deal, &item)) return 0;
    zl_cut_run(w, item % w->runs);
    w->next = item / w->runs * w->tokens;
    w->end = w->next + w->tokens < w->rows ? w->next + w->tokens : w->rows;
  }
  w->cut.t0 = w->next++;
  while (w->next < w->end && t->token_seq[w->next] == t->token_seq[w->cut.t0]) w->next++;
  w->cut.t1 = w->next;
  return 1;
}

ZL_KERNEL int zl_next_cut(const zl_task *t, zl_tiles *w, const zl_attention_io *io, const zl_attention_shape *a) {
  if (w->parts > 1) return zl_next_span(t, w, io, a);
  return w->few ? zl_next_heads(w) : zl_next_tokens(t, w);
}

ZL_KERNEL void zl_attention_all(const zl_task *t, int64_t rows, const zl_attention_io *io,
                                const zl_attention_shape *a) {
  zl_tiles tiles = zl_tiles_begin(t, rows, io, a);
  while (zl_next_cut(t, &tiles, io, a)) zl_attention_one(t, io, a, &tiles.cut);
}

#endif
