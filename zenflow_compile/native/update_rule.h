// Rule P of runtime/adam_rule.py: one pass over the state, whatever the number of gradients.
//
// Results do not depend on how ranges are cut, or on the width of this CPU's vectors: every element takes the same
// operations, each rounded one time. That needs -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>

#include "state_forms.h"

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
constexpr int kVectors = 4;  // per block: its moments stay in registers while all gradients are applied
constexpr int kBlock = kVectors * kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

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

struct BFloat16 {
  using Element = uint16_t;
  static Floats load(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(loaded<Halves>(from), Words) << 16);
  }
  static void store(uint16_t* to, Floats values) {
    const Words bits = (Words)values;
    const Words nearest_even = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
    const Ints is_nan = values != values;
    const Words rounded = ((Words)is_nan & 0x7fc0) | (~(Words)is_nan & nearest_even);
    const Halves halves = __builtin_convertvector(rounded, Halves);
    std::memcpy(to, &halves, sizeof halves);
  }
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

// Casts fp32 elements, with the rounding of the output of `update`.
template <class Dtype>
inline void cast(const float* from, typename Dtype::Element* to, int64_t count) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) Dtype::store(to + at, Float32::load(from + at));
  const int rest = (int)(count - at);
  if (rest > 0) store_some<Dtype>(to + at, load_some<Float32>(from + at, rest), rest);
}

// ---- the rule

// One gradient of an update window: the hyperparameters of the optimizer step that used it.
struct Step {
  float grad_scale;
  float beta1;
  float beta1_rest;  // 1 - beta1, computed in double precision
  float beta2;
  float beta2_rest;
};

// The update window of one parameter. Python fills it: see UpdateWindow in native/library.py.
struct UpdateWindow {
  StoredState state;
  void* out;
  const void* const* gradients;  // oldest first
  const Step* steps;             // one for each
  int64_t count;                 // of gradients
  int64_t slices;                // of int8 gradients, which begin with a scale per slice: float[slices]
  uint32_t random;               // decides how moments are rounded to fewer bits: another number at each update
  int32_t gradient_dtype;
  int32_t out_dtype;
  float decay;
  float step_size;
  float bias_correction2_sqrt;
  float eps;
};

inline Floats root(Floats values) {
  Floats roots;
  // Becomes one instruction with -fno-math-errno.
  for (int lane = 0; lane < kLanes; ++lane) roots[lane] = __builtin_sqrtf(values[lane]);
  return roots;
}

inline void add_gradient(const Step& step, Floats gradient, Floats& exp_avg, Floats& exp_avg_sq) {
  gradient = gradient * step.grad_scale;
  exp_avg = step.beta1 * exp_avg + step.beta1_rest * gradient;
  exp_avg_sq = step.beta2 * exp_avg_sq + step.beta2_rest * gradient * gradient;
}

inline Floats new_master(const UpdateWindow& window, Floats master, Floats exp_avg, Floats exp_avg_sq) {
  const Floats denominator = root(exp_avg_sq) / window.bias_correction2_sqrt + window.eps;
  return window.decay * master - window.step_size * exp_avg / denominator;
}

// Gradients in the order of the state.
template <class Gradient>
struct Dense {
  const UpdateWindow& window;
  Floats load(int64_t number, int64_t at) const {
    return Gradient::load((const typename Gradient::Element*)window.gradients[number] + at);
  }
  Floats load_some(int64_t number, int64_t at, int count) const {
    return zenflow::load_some<Gradient>((const typename Gradient::Element*)window.gradients[number] + at, count);
  }
};

// int8 gradients inside of one slice.
struct Compressed {
  const UpdateWindow& window;
  int64_t slice;
  const int8_t* values(int64_t number) const {
    return (const int8_t*)window.gradients[number] + sizeof(float) * window.slices;
  }
  float scale(int64_t number) const { return ((const float*)window.gradients[number])[slice]; }
  Floats load(int64_t number, int64_t at) const { return Int8::load(values(number) + at) * scale(number); }
  Floats load_some(int64_t number, int64_t at, int count) const {
    return zenflow::load_some<Int8>(values(number) + at, count) * scale(number);
  }
};

// fp32 state from element `origin` on.
struct PlainState {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t origin;
};

template <class Out, class Gradients>
void update(const UpdateWindow& window, const PlainState& state, const Gradients& gradients, int64_t begin, int64_t end) {
  auto* const out = (typename Out::Element*)window.out;
  int64_t at = begin;
  for (; at + kBlock <= end; at += kBlock) {
    Floats exp_avg[kVectors], exp_avg_sq[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      exp_avg[i] = Float32::load(state.exp_avg + at - state.origin + i * kLanes);
      exp_avg_sq[i] = Float32::load(state.exp_avg_sq + at - state.origin + i * kLanes);
    }
    for (int64_t number = 0; number < window.count; ++number) {
      const Step step = window.steps[number];
      for (int i = 0; i < kVectors; ++i) {
        add_gradient(step, gradients.load(number, at + i * kLanes), exp_avg[i], exp_avg_sq[i]);
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      const int64_t here = at + i * kLanes, in_state = here - state.origin;
      const Floats master = new_master(window, Float32::load(state.master + in_state), exp_avg[i], exp_avg_sq[i]);
      Float32::store(state.exp_avg + in_state, exp_avg[i]);
      Float32::store(state.exp_avg_sq + in_state, exp_avg_sq[i]);
      Float32::store(state.master + in_state, master);
      Out::store(out + here, master);
    }
  }
  for (; at < end; at += kLanes) {
    const int count = end - at < kLanes ? (int)(end - at) : kLanes;
    const int64_t in_state = at - state.origin;
    Floats exp_avg = load_some<Float32>(state.exp_avg + in_state, count);
    Floats exp_avg_sq = load_some<Float32>(state.exp_avg_sq + in_state, count);
    for (int64_t number = 0; number < window.count; ++number) {
      add_gradient(window.steps[number], gradients.load_some(number, at, count), exp_avg, exp_avg_sq);
    }
    const Floats master = new_master(window, load_some<Float32>(state.master + in_state, count), exp_avg, exp_avg_sq);
    store_some<Float32>(state.exp_avg + in_state, exp_avg, count);
    store_some<Float32>(state.exp_avg_sq + in_state, exp_avg_sq, count);
    store_some<Float32>(state.master + in_state, master, count);
    store_some<Out>(out + at, master, count);
  }
}

template <class Out>
void update_any(const UpdateWindow& window, const PlainState& state, int64_t begin, int64_t end) {
  const int64_t length = window.state.length;
  switch (window.gradient_dtype) {
    case kFloat32: return update<Out>(window, state, Dense<Float32>{window}, begin, end);
    case kBFloat16: return update<Out>(window, state, Dense<BFloat16>{window}, begin, end);
    case kFloat16: return update<Out>(window, state, Dense<Float16>{window}, begin, end);
    case kInt8:
      while (begin < end) {
        const int64_t slice = begin / length;
        const int64_t stop = (slice + 1) * length < end ? (slice + 1) * length : end;
        update<Out>(window, state, Compressed{window, slice}, begin, stop);
        begin = stop;
      }
  }
}

}  // namespace zenflow
