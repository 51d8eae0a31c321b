// Vectors of this CPU, and the dtypes that they are loaded from and stored to.
#pragma once

#include <cstdint>
#include <cstring>

// fp32 elements of this CPU's vectors. GCC 12 takes wider ones apart again, which is ten times slower.
#if defined(__AVX512F__)
#define ZENFLOW_LANES 16
#elif defined(__AVX2__) && defined(__F16C__)
#define ZENFLOW_LANES 8
#else
#define ZENFLOW_LANES 4
#endif

#if ZENFLOW_LANES > 4
#include <immintrin.h>
#endif

namespace zenflow {

constexpr int kLanes = ZENFLOW_LANES;
// Per block: its moments stay in registers while all gradients are applied. It is whole quantization blocks.
constexpr int kVectors = kLanes > 4 ? 4 : 8;
constexpr int kBlock = kVectors * kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

// Calls `work(i)` for each vector of an array. The loop is unrolled early: GCC keeps an array with variable indices in
// memory, and the others in registers.
template <int kCount, class Work>
inline void each_vector(Work work) {
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) work(i);
}

// ---- dtypes: how elements are loaded and stored

template <class Vector, class Element>
inline Vector loaded(const Element* from) {
  Vector values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

struct Float32 {
  using Element = float;
  static Floats load(const float* from) { return loaded<Floats>(from); }
  static void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }
};

// GCC 12 would convert vectors of 16-bit integers in two parts, and those of bytes element by element.
inline Words load_halves(const uint16_t* from) {
#if ZENFLOW_LANES == 16
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif ZENFLOW_LANES == 8
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  return __builtin_convertvector(loaded<Halves>(from), Words);
#endif
}

// Stores the lower halves.
inline void store_halves(uint16_t* to, Words values) {
#if ZENFLOW_LANES == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)values));
#else
  const Halves halves = __builtin_convertvector(values, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

inline Words load_bytes(const uint8_t* from) {
#if ZENFLOW_LANES == 16
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif ZENFLOW_LANES == 8
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint8_t Codes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(loaded<Codes>(from), Words);
#endif
}

// Stores the lowest bytes.
inline void store_bytes(uint8_t* to, Words values) {
#if ZENFLOW_LANES == 16
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values));
#elif ZENFLOW_LANES == 8
  const __m256i words = (__m256i)values;
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = (uint8_t)values[lane];
#endif
}

// The bits of bf16 numbers, in the lower halves.
inline Words nearest_bfloat16(Floats values) {
  const Words bits = (Words)values;
  const Words nearest_even = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
  return values != values ? 0x7fc0u : nearest_even;
}

struct BFloat16 {
  using Element = uint16_t;
  static Floats load(const uint16_t* from) { return (Floats)(load_halves(from) << 16); }
  static void store(uint16_t* to, Floats values) { store_halves(to, nearest_bfloat16(values)); }
};

struct Float16 {
  using Element = uint16_t;
#if ZENFLOW_LANES == 16
  static Floats load(const uint16_t* from) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
  static void store(uint16_t* to, Floats values) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT));
  }
#elif ZENFLOW_LANES == 8
  static Floats load(const uint16_t* from) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
  static void store(uint16_t* to, Floats values) {
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  typedef _Float16 Values __attribute__((vector_size(2 * kLanes)));
  static Floats load(const uint16_t* from) { return __builtin_convertvector(loaded<Values>(from), Floats); }
  static void store(uint16_t* to, Floats values) {
    const Values halves = __builtin_convertvector(values, Values);
    std::memcpy(to, &halves, sizeof halves);
  }
#endif
};

struct Int8 {
  using Element = int8_t;
  // GCC 12 would convert vectors of bytes element by element.
#if ZENFLOW_LANES == 16
  static Floats load(const int8_t* from) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  }
#elif ZENFLOW_LANES == 8
  static Floats load(const int8_t* from) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
  }
#else
  static Floats load(const int8_t* from) { return __builtin_convertvector(loaded<Bytes>(from), Floats); }
#endif
};

// The elements of a partial vector, padded with zeros.
template <class Dtype>
inline Floats load_some(const typename Dtype::Element* from, int count) {
  typename Dtype::Element padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof *from);
  return Dtype::load(padded);
}

template <class Dtype>
inline void store_some(typename Dtype::Element* to, Floats values, int count) {
  typename Dtype::Element padded[kLanes];
  Dtype::store(padded, values);
  std::memcpy(to, padded, count * sizeof *to);
}

inline uint32_t largest(Words values) {
#if ZENFLOW_LANES == 16
  return _mm512_reduce_max_epu32((__m512i)values);
#else
  uint32_t most = 0;
  for (int lane = 0; lane < kLanes; ++lane) most = values[lane] > most ? values[lane] : most;
  return most;
#endif
}

// Casts fp32 elements, with the rounding of the output of `update`.
template <class Dtype>
inline void cast(const float* from, typename Dtype::Element* to, int64_t count) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) Dtype::store(to + at, Float32::load(from + at));
  const int rest = (int)(count - at);
  if (rest > 0) store_some<Dtype>(to + at, load_some<Float32>(from + at, rest), rest);
}

}  // namespace zenflow
