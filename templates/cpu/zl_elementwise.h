/* Element by element and row by row: Add, Sub, Mul, Div, activations, Softcap, Softmax, Gather.
 *
 * In: zl_math.h.  Out: the kernels.  Next file: zl_sample.h.
 *
 * Operands are rows x C float32; work is split into runs of 16 elements over all rows.  Rows of int8 are picked whole.
 */
#ifndef ZL_ELEMENTWISE_H
#define ZL_ELEMENTWISE_H
#include "zl_math.h"

enum zl_binary { ZL_ADD, ZL_SUB, ZL_MUL, ZL_DIV };

ZL_KERNEL v16f zl_binary_op(int op, v16f a, v16f b) {
  return op == ZL_ADD ? a + b : op == ZL_SUB ? a - b : op == ZL_MUL ? a * b : a / b;
}

/* elements i .. i + n of an operand: repeated (scalar), by column (row) or as it is */
ZL_KERNEL v16f zl_operand(const float *p, int scalar, int row, int64_t i, int64_t n, int64_t C) {
  if (scalar) return zl_set(p[0]);
  return zl_load_n(p + (row ? i % C : i), n);
}

/* a, b f32[rows, C], or one of them f32[1] or f32[C] -> y f32[rows, C]; y may be a full-size operand */
ZL_KERNEL void zl_binary(const zl_task *t, int op, int64_t rows, const float *a, const float *b, float *y, int64_t C,
                         int broadcast) {
  const int by_row = broadcast == ZL_ROW_A || broadcast == ZL_ROW_B;
  /* a run of 16 may cross rows only where no operand repeats by column */
  const int64_t width = by_row ? C : rows * C, runs = (width + 15) / 16, count = by_row ? rows : 1;
  int64_t i, end;
  zl_share(t, count * runs, &i, &end);
  for (; i < end; i++) {
    const int64_t c = i % runs * 16, at = i / runs * width + c, n = width - c < 16 ? width - c : 16;
    v16f x = zl_operand(a, broadcast == ZL_SCALAR_A, broadcast == ZL_ROW_A, at, n, C);
    v16f z = zl_operand(b, broadcast == ZL_SCALAR_B, broadcast == ZL_ROW_B, at, n, C);
    zl_store_n(y + at, zl_binary_op(op, x, z), n);
  }
}

ZL_KERNEL void zl_add(const zl_task *t, int64_t rows, const float *a, const float *b, float *y, int64_t C, int bc) {
  zl_binary(t, ZL_ADD, rows, a, b, y, C, bc);
}
ZL_KERNEL void zl_sub(const zl_task *t, int64_t rows, const float *a, const float *b, float *y, int64_t C, int bc) {
  zl_binary(t, ZL_SUB, rows, a, b, y, C, bc);
}
ZL_KERNEL void zl_mul(const zl_task *t, int64_t rows, const float *a, const float *b, float *y, int64_t C, int bc) {
  zl_binary(t, ZL_MUL, rows, a, b, y, C, bc);
}
ZL_KERNEL void zl_div(const zl_task *t, int64_t rows, const float *a, const float *b, float *y, int64_t C, int bc) {
  zl_binary(t, ZL_DIV, rows, a, b, y, C, bc);
}

/* FOR_RUNS { x at i, n elements }: this thread's runs of rows * C elements; y may be x */
#define ZL_UNARY(rows, C, x, y, EXPR)                                       \
  do {                                                                      \
    const int64_t zl_all = (rows) * (C);                                    \
    int64_t zl_i, zl_end;                                                   \
    zl_share(t, (zl_all + 15) / 16, &zl_i, &zl_end);                        \
    for (; zl_i < zl_end; zl_i++) {                                         \
      const int64_t zl_n = zl_all - 16 * zl_i < 16 ? zl_all - 16 * zl_i : 16; \
      const v16f v = zl_load_n((x) + 16 * zl_i, zl_n);                      \
      zl_store_n((y) + 16 * zl_i, (EXPR), zl_n);                            \
    }                                                                       \
  } while (0)

/* x f32[rows, C] -> y f32[rows, C] */
ZL_KERNEL void zl_swish(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C, double alpha) {
  ZL_UNARY(rows, C, x, y, v * zl_sigmoid(v * (float)alpha));
}
ZL_KERNEL void zl_gelu(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C, int approximate) {
  ZL_UNARY(rows, C, x, y, zl_activate(approximate, v));
}
ZL_KERNEL void zl_relu(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C) {
  ZL_UNARY(rows, C, x, y, zl_activate(ZL_ACT_RELU, v));
}
ZL_KERNEL void zl_tanh_rows(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C) {
  ZL_UNARY(rows, C, x, y, zl_tanh(v));
}
ZL_KERNEL void zl_sigmoid_rows(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C) {
  ZL_UNARY(rows, C, x, y, zl_sigmoid(v));
}
/* y = cap * tanh(x / cap) */
ZL_KERNEL void zl_softcap(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C, double cap) {
  ZL_UNARY(rows, C, x, y, (float)cap * zl_tanh(v / (float)cap));
}

/* x f32[rows, C] -> y f32[rows, C], each row e^(x - max) / sum; y may be x */
ZL_KERNEL void zl_softmax(const zl_task *t, int64_t rows, const float *x, float *y, int64_t C) {
  int64_t row, end;
  zl_share(t, rows, &row, &end);
  for (; row < end; row++) {
    const float *from = x + row * C;
    float *to = y + row * C;
    float top = from[0];
    for (int64_t c = 0; c < C; c++) top = from[c] > top ? from[c] : top;
    v16f total = zl_set(0.0f);
    for (int64_t c = 0; c < C; c += 16) {
      const int64_t n = C - c < 16 ? C - c : 16;
      zl_store_n(to + c, zl_exp(zl_load_n(from + c, n) - top), n);
      total = total + zl_load_n(to + c, n);
    }
    const float sum = zl_hsum(total);
    for (int64_t c = 0; c < C; c += 16) {
      const int64_t n = C - c < 16 ? C - c : 16;
      zl_store_n(to + c, zl_load_n(to + c, n) / sum, n);
    }
  }
}

/* x f32[X, C], index i32[R] -> y f32[R, C] = x[index]; the indices were checked with the batch */
ZL_KERNEL void zl_gather(const zl_task *t, int64_t rows, const float *x, const int32_t *index, float *y, int64_t C) {
  const int64_t runs = (C + 15) / 16;
  int64_t i, end;
  zl_share(t, rows * runs, &i, &end);
  for (; i < end; i++) {
    const int64_t row = i / runs, c = i % runs * 16, n = C - c < 16 ? C - c : 16;
    zl_store_n(y + row * C + c, zl_load_n(x + index[row] * C + c, n), n);
  }
}

/* rows of a quantized bundle: q i8[T, C], scale f32[T, C/32], sums f32[T, C/16], index i32[rows] -> the same of [rows] */
ZL_KERNEL void zl_gather_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale, const float *sums,
                              const int32_t *index, int8_t *yq, float *yscale, float *ysums, int64_t C) {
  int64_t row, end;
  zl_share(t, rows, &row, &end);
  for (; row < end; row++) {
    const int64_t from = index[row];
    memcpy(yq + row * C, q + from * C, (size_t)C);
    memcpy(yscale + row * (C / 32), scale + from * (C / 32), (size_t)(C / 32) * sizeof(float));
    memcpy(ysums + row * (C / 16), sums + from * (C / 16), (size_t)(C / 16) * sizeof(float));
  }
}

#endif
