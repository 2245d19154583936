/* How the weights of a matrix product are read: how far ahead of their use, and in how many streams.
 *
 * In: zl_task.h (ZL_STREAMS, zl_first_half).  Out: zl_asks, zl_ask_ahead, ZL_FEW_ROWS.  Next file: zl_dot_int8.h.
 */
#ifndef ZL_STREAMS_H
#define ZL_STREAMS_H
#include "zl_task.h"

#ifndef ZL_PREFETCH_BYTES
#define ZL_PREFETCH_BYTES 4096 /* how far ahead of use a product of several tokens asks for weights */
#endif
#ifndef ZL_STREAM_BYTES
#define ZL_STREAM_BYTES 0 /* the same for one or two tokens; 0: the machine's prefetchers do it */
#endif

/* How far ahead MT tokens ask for weights, 0: not at all.  Several compute longer on a block than the machine's
 * prefetchers look ahead.  One or two read at the memory's rate; whether asking helps or costs is a fact of the target
 * (docs/decisions.md). */
ZL_KERNEL int64_t zl_asks(int MT) { return MT > 2 ? ZL_PREFETCH_BYTES : ZL_STREAM_BYTES; }

/* Asks for the `bytes` that lie `ahead` after p; 0: for nothing. */
ZL_KERNEL void zl_ask_ahead(int64_t ahead, const uint8_t *p, int64_t bytes) {
  if (!ahead) return;
  ZL_UNROLL
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + ahead + i, 0, 3);
}

/* CALL(MT, ...) for the one row or two of a call that reads two streams; none of that code on other targets. */
#define ZL_FEW_ROWS(rows, CALL, ...)          \
  do {                                        \
    if (ZL_STREAMS == 2 && (rows) == 1)       \
      CALL(1, __VA_ARGS__);                   \
    else if (ZL_STREAMS == 2 && (rows) == 2)  \
      CALL(2, __VA_ARGS__);                   \
  } while (0)

#endif
