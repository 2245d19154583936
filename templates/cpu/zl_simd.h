/* Vectors of 16 lanes, the same type on every instruction set.
 *
 * In: zl_task.h.  Out: v16f and friends, loads and stores, the few primitives that need an instruction of their
 * own (integer dot product, half conversion, maximum), elementary functions in zl_math.h.  Next file: zl_math.h.
 *
 * Arithmetic on clang vector types compiles to two 256-bit operations where there is no 512-bit one, lane for lane
 * the same.  Contraction is off: where a fused multiply-add is meant, zl_fma says so, so results do not depend
 * on the instruction set.  A new architecture adds one branch to each #if below.
 */
#ifndef ZL_SIMD_H
#define ZL_SIMD_H
#include "zl_task.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "zl_simd.h needs AVX2, FMA and F16C (x86-64-v3)"
#endif
#else
#error "zl_simd.h has no branch for this architecture"
#endif
#pragma STDC FP_CONTRACT OFF

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ZL_AVX512 1
#else
#define ZL_AVX512 0
#endif
#pragma clang diagnostic ignored "-Wpsabi" /* every function with vector arguments is inlined */

typedef float v16f __attribute__((vector_size(64)));
typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef double v8d __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v32u16 __attribute__((vector_size(64)));
typedef int16_t v32s16 __attribute__((vector_size(64)));
typedef uint16_t v16u16 __attribute__((vector_size(32)));
typedef uint8_t v64u8 __attribute__((vector_size(64)));
typedef uint8_t v16u8 __attribute__((vector_size(16)));
typedef int8_t v16s8 __attribute__((vector_size(16)));

#define ZL_LO(x) __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
#define ZL_HI(x) __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)
#define ZL_JOIN(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

/* What is written before it that a and b need comes before what needs them after it: the compiler keeps chains of
 * products in step, in the order written.  Its own order costs a register tile of products 3 to 5 % (Zen 4). */
#if ZL_AVX512
#define ZL_IN_TURN(a, b) __asm__ volatile("" : "+v"(a), "+v"(b))
#else
#define ZL_IN_TURN(a, b) ((void)0)
#endif
#if !defined(__AVX512VNNI__)
/* The same for one of several chains: written after each of its links, it keeps all in step and in registers. */
ZL_KERNEL v32s16 zl_in_step(v32s16 a) {
#if ZL_AVX512
  __asm__ volatile("" : "+v"(a));
  return a;
#else
  v8i low = ZL_LO((v16i)a), high = ZL_HI((v16i)a);
  __asm__ volatile("" : "+x"(low), "+x"(high));
  return (v32s16)ZL_JOIN(low, high);
#endif
}
#endif

/* loads and stores, any alignment */
ZL_KERNEL v16f zl_load(const float *p) { v16f v; memcpy(&v, p, 64); return v; }
ZL_KERNEL void zl_store(float *p, v16f v) { memcpy(p, &v, 64); }
ZL_KERNEL v64u8 zl_load_bytes(const uint8_t *p) { v64u8 v; memcpy(&v, p, 64); return v; }
ZL_KERNEL v16u8 zl_load_u8(const uint8_t *p) { v16u8 v; memcpy(&v, p, 16); return v; }
ZL_KERNEL v16f zl_set(float x) { return (v16f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
ZL_KERNEL v16f zl_fma(v16f a, v16f b, v16f c) { return __builtin_elementwise_fma(a, b, c); }

/* the first n of 16 floats, the others 0; n in 0..16 */
ZL_KERNEL v16f zl_load_n(const float *p, int64_t n) {
  if (n >= 16) return zl_load(p);
#if ZL_AVX512
  return (v16f)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
  v16f v = {0};
  memcpy(&v, p, (size_t)n * 4);
  return v;
#endif
}

ZL_KERNEL void zl_store_n(float *p, v16f v, int64_t n) {
  if (n >= 16) {
    zl_store(p, v);
    return;
  }
#if ZL_AVX512
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#else
  memcpy(p, &v, (size_t)n * 4);
#endif
}

/* the low halves of x -> half `odd` of each of n words at p; the other halves are not touched */
ZL_KERNEL void zl_store_halves(char *p, v16u x, int odd, int64_t n) {
#if ZL_AVX512
  const __mmask32 lanes = (__mmask32)(((1ull << 2 * n) - 1u) & (odd ? 0xaaaaaaaau : 0x55555555u));
  _mm512_mask_storeu_epi16(p, lanes, (__m512i)(odd ? x << 16 : x));
#else
  for (int64_t i = 0; i < n; i++) {
    const uint16_t one = (uint16_t)x[i];
    memcpy(p + 4 * i + 2 * odd, &one, 2);
  }
#endif
}

/* lanewise a where the mask (0 or -1 per lane) is set, else b */
ZL_KERNEL v16f zl_select(v16i mask, v16f a, v16f b) {
#if ZL_AVX512
  return (v16f)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)b, (__m512)a);
#else
  return (v16f)((mask & (v16i)a) | (~mask & (v16i)b));
#endif
}

ZL_KERNEL v16f zl_abs(v16f x) { return (v16f)((v16i)x & 0x7fffffff); }
ZL_KERNEL v16f zl_sqrt(v16f x) { return __builtin_elementwise_sqrt(x); }
ZL_KERNEL v16f zl_round_even(v16f x) { return __builtin_elementwise_roundeven(x); }
ZL_KERNEL v16f zl_to_float(v16i x) { return __builtin_convertvector(x, v16f); }

/* b where either is NaN */
ZL_KERNEL v16f zl_max(v16f a, v16f b) {
#if ZL_AVX512
  return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return ZL_JOIN((v8f)_mm256_max_ps((__m256)ZL_LO(a), (__m256)ZL_LO(b)),
                 (v8f)_mm256_max_ps((__m256)ZL_HI(a), (__m256)ZL_HI(b)));
#endif
}

ZL_KERNEL v16f zl_min(v16f a, v16f b) {
#if ZL_AVX512
  return (v16f)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return ZL_JOIN((v8f)_mm256_min_ps((__m256)ZL_LO(a), (__m256)ZL_LO(b)),
                 (v8f)_mm256_min_ps((__m256)ZL_HI(a), (__m256)ZL_HI(b)));
#endif
}

/* lanes 0..15 -> integer, NaN and out of range -> INT32_MIN (the C conversion would be undefined) */
ZL_KERNEL v16i zl_to_int(v16f x) {
#if ZL_AVX512
  return (v16i)_mm512_cvttps_epi32((__m512)x);
#else
  return ZL_JOIN((v8i)_mm256_cvttps_epi32((__m256)ZL_LO(x)), (v8i)_mm256_cvttps_epi32((__m256)ZL_HI(x)));
#endif
}

/* rounded half to even; NaN and what is out of range -> INT32_MIN, whose lowest byte zl_quantize.h keeps: 0 */
ZL_KERNEL v16i zl_round_to_int(v16f x) {
#if ZL_AVX512
  return (v16i)_mm512_cvt_roundps_epi32((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return zl_to_int(zl_round_even(x));
#endif
}

/* sum over lanes, always in the same order: halves, quarters, ... */
ZL_KERNEL float zl_hsum(v16f x) {
  typedef float v4f_ __attribute__((vector_size(16)));
  v8f a = ZL_LO(x) + ZL_HI(x);
  v4f_ b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

/* maximum of non-negative floats; NaN counts as larger than infinity */
ZL_KERNEL float zl_hmax_abs(v16f x) {
  int32_t bits = __builtin_reduce_max((v16i)x & 0x7fffffff);
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

/* maximum over lanes; no lane may be NaN */
ZL_KERNEL float zl_hmax(v16f x) {
  typedef float v4f_ __attribute__((vector_size(16)));
  __m256 a = _mm256_max_ps((__m256)ZL_LO(x), (__m256)ZL_HI(x));
  v4f_ b = (v4f_)_mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  float u = b[0] > b[2] ? b[0] : b[2], v = b[1] > b[3] ? b[1] : b[3];
  return u > v ? u : v;
}

/* 16 halves at p (any alignment) <-> 16 floats; rounds to nearest even */
ZL_KERNEL v16f zl_load_half(const void *p) {
  v16u16 h;
  memcpy(&h, p, 32);
#if ZL_AVX512
  return (v16f)_mm512_cvtph_ps((__m256i)h);
#else
  __m256i x = (__m256i)h;
  return ZL_JOIN((v8f)_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                 (v8f)_mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
#endif
}

ZL_KERNEL v16u16 zl_to_half(v16f x) {
#if ZL_AVX512
  return (v16u16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (v16u16)_mm256_set_m128i(_mm256_cvtps_ph((__m256)ZL_HI(x), _MM_FROUND_TO_NEAREST_INT),
                                  _mm256_cvtps_ph((__m256)ZL_LO(x), _MM_FROUND_TO_NEAREST_INT));
#endif
}

/* x rounded to bfloat16, nearest even, as a float; NaN stays NaN */
ZL_KERNEL v16f zl_round_bf16(v16f x) {
  v16u u = (v16u)x;
  v16u r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  v16i nan = (v16i)(x != x);
  return zl_select(nan, (v16f)((u | 0x00400000u) & 0xffff0000u), (v16f)r);
}

/* Two columns of a bf16 weight beside each other in each of 16 lanes, and two bf16 activations for all of them.
 * zl_dot_pair: acc + odd * odd, then + even * even, each one fused multiply-add; where there is an instruction for it,
 * that is its order (it takes denormals for zero).  Elsewhere both columns are float32 lanes of their own. */
#if ZL_AVX512 && defined(__AVX512BF16__)
typedef uint32_t zl_pair; /* bf16 even | odd << 16 */
typedef v16i zl_pairs16;
ZL_KERNEL v16u16 zl_to_bf16(v16f x) { return (v16u16)_mm512_cvtneps_pbh((__m512)x); }
ZL_KERNEL zl_pairs16 zl_pairs_of(v64u8 both) { return (v16i)both; }
ZL_KERNEL v16f zl_dot_pair(v16f acc, zl_pairs16 a, zl_pair b) {
  return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
}
/* the same for a pair of each lane */
ZL_KERNEL v16f zl_dot_pairs(v16f acc, v16i a, v16i b) {
  return (v16f)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
/* 32 floats, rounded to nearest even -> 16 pairs */
ZL_KERNEL v16i zl_to_pairs(v16f low, v16f high) {
  return (v16i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
ZL_KERNEL void zl_store_pairs(zl_pair *to, v16f low, v16f high) {
  const v16i pairs = zl_to_pairs(low, high);
  memcpy(to, &pairs, 64);
}
#else
typedef struct zl_pair {
  float even, odd;
} zl_pair;
typedef struct zl_pairs16 {
  v16f even, odd;
} zl_pairs16;
ZL_KERNEL zl_pairs16 zl_pairs_of(v64u8 both) {
  return (zl_pairs16){(v16f)((v16u)both << 16), (v16f)((v16u)both & 0xffff0000u)};
}
ZL_KERNEL v16f zl_dot_pair(v16f acc, zl_pairs16 a, zl_pair b) {
  return zl_fma(a.even, zl_set(b.even), zl_fma(a.odd, zl_set(b.odd), acc));
}
ZL_KERNEL void zl_store_pairs(zl_pair *to, v16f low, v16f high) {
  zl_store(&to->even, zl_round_bf16(low));
  zl_store(&to[8].even, zl_round_bf16(high));
}
#endif
ZL_KERNEL zl_pairs16 zl_load_pairs16(const uint8_t *p) { return zl_pairs_of(zl_load_bytes(p)); }

/* 4 signed bytes repeated in every lane */
ZL_KERNEL v16i zl_repeat4(const int8_t *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return (v16i){0} + x;
}

#if !defined(__AVX512VNNI__)
/* 32 sums of 2 products u8 x s8; exact where none leaves int16, which two of up to 128 x 127 do not */
ZL_KERNEL v32s16 zl_dot2(v64u8 u, v16i s) {
#if ZL_AVX512
  return (v32s16)_mm512_maddubs_epi16((__m512i)u, (__m512i)s);
#else
  const v16i x = (v16i)u;
  return (v32s16)ZL_JOIN((v8i)_mm256_maddubs_epi16((__m256i)ZL_LO(x), (__m256i)ZL_LO(s)),
                         (v8i)_mm256_maddubs_epi16((__m256i)ZL_HI(x), (__m256i)ZL_HI(s)));
#endif
}

/* two neighbours times k, added, in each of 16 lanes */
ZL_KERNEL v16i zl_widen2(v32s16 a, int16_t k) {
#if ZL_AVX512
  return (v16i)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(k));
#else
  const v16i x = (v16i)a;
  const __m256i times = _mm256_set1_epi16(k);
  return ZL_JOIN((v8i)_mm256_madd_epi16((__m256i)ZL_LO(x), times), (v8i)_mm256_madd_epi16((__m256i)ZL_HI(x), times));
#endif
}
#endif

/* acc + sum of 4 products u8 x s8 per lane, exact for every input */
ZL_KERNEL v16i zl_dot4_u8(v16i acc, v64u8 u, v16i s) {
#if defined(__AVX512VNNI__)
  return (v16i)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#else
  const v64u8 low = u & 15, high = (v64u8)((v32u16)u >> 4) & 15; /* two products of bytes could leave int16 */
  return acc + zl_widen2(zl_dot2(low, s), 1) + zl_widen2(zl_dot2(high, s), 16);
#endif
}

/* 32 signed bytes as 16 pairs of 16 bits */
ZL_KERNEL v32s16 zl_load_widened(const void *p) {
#if ZL_AVX512
  __m256i x;
  memcpy(&x, p, 32);
  return (v32s16)_mm512_cvtepi8_epi16(x);
#else
  __m128i x[2];
  memcpy(x, p, 32);
  return (v32s16)ZL_JOIN((v8i)_mm256_cvtepi8_epi16(x[0]), (v8i)_mm256_cvtepi8_epi16(x[1]));
#endif
}

/* acc + the two products of each lane's 16-bit pair with `pair`; no sum may leave 32 bits */
ZL_KERNEL v16i zl_dot_s16(v16i acc, v32s16 a, uint32_t pair) {
  const v16u b = (v16u){0} + pair;
#if defined(__AVX512VNNI__) && ZL_AVX512
  return (v16i)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif ZL_AVX512
  return acc + (v16i)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return acc + ZL_JOIN((v8i)_mm256_madd_epi16((__m256i)ZL_LO((v16i)a), (__m256i)ZL_LO((v16i)b)),
                       (v8i)_mm256_madd_epi16((__m256i)ZL_HI((v16i)a), (__m256i)ZL_HI((v16i)b)));
#endif
}

/* 16 integers as 16-bit ones at p, the nearest there are */
ZL_KERNEL void zl_store_s16(void *p, v16i x) {
#if ZL_AVX512
  const __m256i y = _mm512_cvtsepi32_epi16((__m512i)x);
#else
  const __m256i y = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)ZL_LO(x), (__m256i)ZL_HI(x)), 0xd8);
#endif
  memcpy(p, &y, 32);
}

/* lane i: q[4 i] + .. + q[4 i + 3] */
ZL_KERNEL v8i zl_sum4(const int8_t *q) {
  __m256i x;
  memcpy(&x, q, 32);
  return (v8i)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), x), _mm256_set1_epi16(1));
}

/* a 16-entry byte table looked up by 64 nibbles */
ZL_KERNEL v64u8 zl_table16(v16u8 table, v64u8 index) {
#if ZL_AVX512
  return (v64u8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)index);
#else
  __m256i t = _mm256_broadcastsi128_si256((__m128i)table);
  v16i i = (v16i)index;
  return (v64u8)ZL_JOIN((v8i)_mm256_shuffle_epi8(t, (__m256i)ZL_LO(i)), (v8i)_mm256_shuffle_epi8(t, (__m256i)ZL_HI(i)));
#endif
}

/* Bytes of a and b in turn, within each quarter of a vector: of its first eight -> to[0], of its last eight -> to[1]. */
ZL_KERNEL void zl_interleave(v64u8 a, v64u8 b, v64u8 to[2]) {
#if ZL_AVX512
  to[0] = (v64u8)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
  to[1] = (v64u8)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
#else
  const __m256i a0 = (__m256i)ZL_LO((v16i)a), a1 = (__m256i)ZL_HI((v16i)a);
  const __m256i b0 = (__m256i)ZL_LO((v16i)b), b1 = (__m256i)ZL_HI((v16i)b);
  to[0] = (v64u8)ZL_JOIN((v8i)_mm256_unpacklo_epi8(a0, b0), (v8i)_mm256_unpacklo_epi8(a1, b1));
  to[1] = (v64u8)ZL_JOIN((v8i)_mm256_unpackhi_epi8(a0, b0), (v8i)_mm256_unpackhi_epi8(a1, b1));
#endif
}

#endif
