/* Weights of bf16 in 12 bits, none of them changed: BF16_12.
 *
 * In: zl_streams.h; the layout is described in targets/bf16_12.py.  Out: zl_12_begin, zl_12_load,
 * zl_12_unpack.  Next file: zl_linear_bf16.h.
 *
 * Of a bf16 number's two bytes the upper one has the sign and seven of eight bits of exponent.  The weights of a matrix
 * have few of these: sixteen of them are all that 16 rows need, but for some numbers next to nothing.  A group of 16 rows
 * begins with its sixteen upper bytes, then come the exceptions, and a weight is a code of 4 bits and its lower byte.
 * Three bytes for two weights are a quarter less to read than bf16, and what a byte shuffle makes of them is the operand
 * of the same products: the same bits as from bf16.
 */
#ifndef ZL_BF16_12_H
#define ZL_BF16_12_H
#include "zl_streams.h"
#include "zl_weights.h"

#define ZL_12_COLUMNS 8     /* of a block */
#define ZL_12_BLOCK 192     /* its bytes: 64 of codes, 128 of lower bytes */
#define ZL_12_EXCEPTION 4   /* bytes of one: block u16, weight u8, upper byte u8 */

/* Where one group is read: its codes' upper bytes, and the next exception. */
typedef struct zl_12_reader {
  v16u8 upper;
  const uint8_t *block, *exception;
  int64_t at; /* block of the next exception */
} zl_12_reader;

ZL_KERNEL int64_t zl_12_exception_block(const uint8_t *p) { return p[0] | p[1] << 8; }

ZL_KERNEL zl_12_reader zl_12_begin(const uint8_t *group, int64_t K) {
  const uint8_t *first = group + 16;
  return (zl_12_reader){zl_load_u8(group), group + zl_12_header(K), first, zl_12_exception_block(first)};
}

/* Block i of the group -> four vectors of 16 pairs, columns 8 i .. 8 i + 7; blocks are taken in order. */
ZL_KERNEL void zl_12_load(zl_12_reader *r, int64_t i, v64u8 to[4]) {
  const uint8_t *p = r->block + i * ZL_12_BLOCK;
  const v64u8 codes = zl_load_bytes(p);
  ZL_UNROLL
  for (int h = 0; h < 2; h++) {
    const v64u8 upper = zl_table16(r->upper, (h ? zl_shift_right(codes, 4) : codes) & 15);
    zl_interleave(zl_load_bytes(p + 64 + 64 * h), upper, to + 2 * h);
  }
  if (__builtin_expect(i == r->at, 0)) {
    uint8_t bytes[256];
    memcpy(bytes, to, 256);
    for (; r->at == i; r->at = zl_12_exception_block(r->exception)) {
      bytes[2 * r->exception[2] + 1] = r->exception[3];
      r->exception += ZL_12_EXCEPTION;
    }
    memcpy(to, bytes, 256);
  }
}

/* Asks for a block that MT tokens will read some blocks after block i, where the machine does not do it by itself.
 * Several tokens ask half as far ahead as int8 products: four tokens are 2 to 6 % faster than with all of it, eight and a
 * prompt as fast (Zen 4).  One and two ask as far as the target says. */
ZL_KERNEL void zl_12_ask(const zl_12_reader *r, int MT, int64_t i) {
  zl_ask_ahead(MT > 2 ? zl_asks(MT) / 2 : zl_asks(MT), r->block + i * ZL_12_BLOCK, ZL_12_BLOCK);
}

/* A group -> the same in 16 bits, K * 32 bytes */
ZL_KERNEL void zl_12_unpack(const uint8_t *group, int64_t K, char *to) {
  zl_12_reader r = zl_12_begin(group, K);
  ZL_NO_UNROLL
  for (int64_t i = 0; i < K / ZL_12_COLUMNS; i++) {
    v64u8 p[4];
    zl_12_ask(&r, 8, i); /* as for eight tokens: many follow */
    zl_12_load(&r, i, p);
    memcpy(to + 256 * i, p, 256);
  }
}

#endif
