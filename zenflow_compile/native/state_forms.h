// Optimizer state in fewer bytes, as runtime/state_forms.py describes it: conversion from and to fp32.
//
// Loops over elements have no branches on values, so that compilers vectorize them; those of 8-bit moments are written
// with vectors, since GCC 12 converts vectors of bytes element by element. Results depend on the values alone, not on
// where they are, how ranges are cut, or the width of vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace zenflow {

constexpr int kQuantizationBlock = 32;  // QUANTIZATION_BLOCK in planning/plan.py
constexpr int kTile = 512;              // most elements that are converted at a time: they stay in the L1 cache

// The state of one parameter. Python fills it: see StoredState in native/library.py.
struct StoredState {
  void* master;         // float, or with `split` the int16 that completes a bf16 weight
  void* exp_avg;        // in the dtype `moments`
  void* exp_avg_sq;
  const void* weights;  // bf16; with `split`
  int64_t length;       // of a slice
  int32_t split;
  int32_t moments;      // kFloat32, kBFloat16 or kInt8
};

inline bool is_plain(const StoredState& state) { return !state.split && state.moments == kFloat32; }

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- random bits

template <class Bits>
inline Bits mixed(Bits bits) {  // "lowbias32" of C. Wellons, Prospecting for Hash Functions (2018)
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits *= 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// 32 bits that decide how two moments are rounded: a function of their bits and of the step.
template <class Bits>
inline Bits random_bits(Bits exp_avg, Bits exp_avg_sq, uint32_t step) {
  return mixed(exp_avg + (exp_avg_sq << 16 | exp_avg_sq >> 16) + step * 0x9e3779b9u);
}

// ---- split masters

inline uint16_t nearest_bfloat16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

inline void join(const uint16_t* __restrict weights, const int16_t* __restrict rest, float* __restrict to, int count) {
  for (int i = 0; i < count; ++i) {
    to[i] = bits_as<float>(((uint32_t)weights[i] << 16) + (uint32_t)(int32_t)rest[i]);
  }
}

inline void split(const float* __restrict from, int16_t* __restrict rest, int count) {
  for (int i = 0; i < count; ++i) {
    const uint32_t weight = (uint32_t)nearest_bfloat16(from[i]) << 16;
    const int32_t left = (int32_t)(bits_as<uint32_t>(from[i]) - weight);
    const int32_t fits = left > 32767 ? 32767 : left;  // a tie that was rounded down: one fp32 ulp lower
    rest[i] = (int16_t)(from[i] != from[i] ? 0 : fits);
  }
}

// ---- moments in bf16

inline void widen(const uint16_t* __restrict from, float* __restrict to, int count) {
  for (int i = 0; i < count; ++i) to[i] = bits_as<float>((uint32_t)from[i] << 16);
}

inline uint16_t rounded_bfloat16(float value, uint32_t half) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t up = (bits & 0x7f800000u) == 0x7f800000u ? 0 : half;  // infinite, or NaN
  return (uint16_t)(value != value ? 0x7fc0u : (bits + up) >> 16);
}

inline void narrow(const float* __restrict exp_avg, const float* __restrict exp_avg_sq, uint16_t* __restrict to,
                   uint16_t* __restrict to_sq, int count, uint32_t step) {
  for (int i = 0; i < count; ++i) {
    const uint32_t random = random_bits(bits_as<uint32_t>(exp_avg[i]), bits_as<uint32_t>(exp_avg_sq[i]), step);
    to[i] = rounded_bfloat16(exp_avg[i], random & 0xffff);
    to_sq[i] = rounded_bfloat16(exp_avg_sq[i], random >> 16);
  }
}

// ---- moments in 8 bits

// A code without its sign is 4 bits of exponent and `kMantissa` of mantissa, of a number in [0, 1]: the largest exponent
// stands for 2^0, the smallest one for subnormal numbers.
constexpr int kMantissa = 3, kMantissaSquare = 4;
constexpr uint32_t kSmallestNormal = (127 - 14) << 23;  // the bits of 2^-14
constexpr uint32_t kExponents = (127 - 15) << 23;       // from those of a code to those of fp32

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

// Of numbers in [0, 1], rounded up if the bits of `random` below a code's last one carry.
template <int mantissa>
inline Words code_of(Floats value, Words random) {
  const Words bits = (Words)value;
  // Below the smallest normal number, the sum has the number in its last bits.
  const Words subnormal = (Words)(value + bits_as<float>(kSmallestNormal)) - kSmallestNormal;
  return ((bits < kSmallestNormal ? subnormal : bits - kExponents) + random) >> (23 - mantissa);
}

template <int mantissa>
inline Floats value_of(Words code) {
  const Words bits = code << (23 - mantissa);
  const Floats subnormal = (Floats)(bits + kSmallestNormal) - bits_as<float>(kSmallestNormal);
  return code < (1u << mantissa) ? subnormal : (Floats)(bits + kExponents);
}

// The scale of a block, as the exponent bits of a power of two that is not below any magnitude; 0 if all are too small for
// one, kLost if one is too large or not finite: then all of the block is lost, and not one element.
constexpr uint32_t kLost = 255;

inline uint8_t scale_of(const float* values) {
  Words most{};  // bits of floats without a sign are in the order of the floats
  for (int i = 0; i < kQuantizationBlock; i += kLanes) {
    const Words magnitude = (Words)Float32::load(values + i) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  uint32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  const uint32_t exponent = (largest + 0x7fffffu) >> 23;
  return (uint8_t)(largest < 0x00800000u ? 0 : exponent >= 254 ? kLost : exponent);
}

inline float power(uint32_t scale) { return scale == kLost ? __builtin_nanf("") : bits_as<float>(scale << 23); }
inline float inverse(uint32_t scale) { return scale == 0 || scale == kLost ? 0.0f : bits_as<float>((254 - scale) << 23); }

// Stores the scales and the codes of one quantization block.
inline void quantize(const float* exp_avg, const float* exp_avg_sq, uint8_t* scales[2], uint8_t* codes[2], uint32_t step) {
  const uint32_t scale = *scales[0] = scale_of(exp_avg), scale_sq = *scales[1] = scale_of(exp_avg_sq);
  const float by = inverse(scale), by_sq = inverse(scale_sq);
  const uint32_t any = scale == kLost ? 0 : ~0u, any_sq = scale_sq == kLost ? 0 : ~0u;  // else all codes are 0
  for (int i = 0; i < kQuantizationBlock; i += kLanes) {
    const Words moment = (Words)Float32::load(exp_avg + i), moment_sq = (Words)Float32::load(exp_avg_sq + i);
    const Words random = random_bits(moment, moment_sq, step);
    const Words code = code_of<kMantissa>((Floats)(moment & (any & 0x7fffffffu)) * by, random & 0xfffffu);
    store_bytes(codes[0] + i, code | ((moment & any) >> 31 << 7));
    const Floats value_sq = (Floats)(moment_sq & any_sq) * by_sq;
    const Words code_sq = code_of<kMantissaSquare>(value_sq, random >> 13);
    // Hazard: a second moment of 0 divides the first one by eps alone.
    const Words lost = (Words)(code_sq == 0) & (Words)(value_sq > 0.0f);
    store_bytes(codes[1] + i, code_sq | (lost & 1));
  }
}

// Loads one quantization block.
inline void expand(uint8_t* const scales[2], uint8_t* const codes[2], float* exp_avg, float* exp_avg_sq) {
  const float by = power(*scales[0]), by_sq = power(*scales[1]);
  for (int i = 0; i < kQuantizationBlock; i += kLanes) {
    const Words code = load_bytes(codes[0] + i);
    const Words magnitude = (Words)(value_of<kMantissa>(code & 0x7f) * by);
    Float32::store(exp_avg + i, (Floats)(magnitude | (code >> 7 << 31)));
    Float32::store(exp_avg_sq + i, value_of<kMantissaSquare>(load_bytes(codes[1] + i)) * by_sq);
  }
}

// Where the codes of element `at`, and the scale of its block, are in a stored moment. A slice begins with its scales.
struct BlockPlace {
  int64_t codes;
  int64_t scale;
};

inline BlockPlace place_of(const StoredState& state, int64_t at) {
  const int64_t blocks = (state.length + kQuantizationBlock - 1) / kQuantizationBlock;
  const int64_t slice = at / state.length, column = at % state.length;
  const int64_t begin = slice * (blocks + state.length);
  return {begin + blocks + column, begin + column / kQuantizationBlock};
}

// ---- all of it

// End of the tile that begins at element `at`: of 8-bit moments, it is whole quantization blocks of one slice.
inline int64_t tile_end(const StoredState& state, int64_t at, int64_t end) {
  int64_t stop = at + kTile;
  if (state.moments == kInt8) {
    const int64_t slice_end = (at / state.length + 1) * state.length;
    stop = stop < slice_end ? stop : slice_end;
  }
  return stop < end ? stop : end;
}

// Where the scales and the codes of both moments of element `at` are.
struct Block {
  uint8_t* scales[2];
  uint8_t* codes[2];

  Block(const StoredState& state, int64_t at) {
    const BlockPlace place = place_of(state, at);
    uint8_t* const moments[] = {(uint8_t*)state.exp_avg, (uint8_t*)state.exp_avg_sq};
    for (int i = 0; i < 2; ++i) scales[i] = moments[i] + place.scale, codes[i] = moments[i] + place.codes;
  }

  void next() {
    for (int i = 0; i < 2; ++i) scales[i] += 1, codes[i] += kQuantizationBlock;
  }
};

inline void decode_moments(const StoredState& state, int64_t at, int count, float* exp_avg, float* exp_avg_sq) {
  if (state.moments == kBFloat16) {
    widen((const uint16_t*)state.exp_avg + at, exp_avg, count);
    widen((const uint16_t*)state.exp_avg_sq + at, exp_avg_sq, count);
    return;
  }
  Block block(state, at);
  int i = 0;
  for (; i + kQuantizationBlock <= count; i += kQuantizationBlock, block.next()) {
    expand(block.scales, block.codes, exp_avg + i, exp_avg_sq + i);
  }
  if (const int rest = count - i) {  // the last block of a slice
    uint8_t codes[2][kQuantizationBlock] = {};
    for (int j = 0; j < 2; ++j) std::memcpy(codes[j], block.codes[j], rest);
    uint8_t* const padded[] = {codes[0], codes[1]};
    float values[2][kQuantizationBlock];
    expand(block.scales, padded, values[0], values[1]);
    std::memcpy(exp_avg + i, values[0], sizeof(float) * rest);
    std::memcpy(exp_avg_sq + i, values[1], sizeof(float) * rest);
  }
}

inline void encode_moments(const StoredState& state, int64_t at, int count, const float* exp_avg, const float* exp_avg_sq,
                           uint32_t step) {
  if (state.moments == kBFloat16) {
    narrow(exp_avg, exp_avg_sq, (uint16_t*)state.exp_avg + at, (uint16_t*)state.exp_avg_sq + at, count, step);
    return;
  }
  Block block(state, at);
  int i = 0;
  for (; i + kQuantizationBlock <= count; i += kQuantizationBlock, block.next()) {
    quantize(exp_avg + i, exp_avg_sq + i, block.scales, block.codes, step);
  }
  if (const int rest = count - i) {  // the last block of a slice
    float values[2][kQuantizationBlock] = {};
    std::memcpy(values[0], exp_avg + i, sizeof(float) * rest);
    std::memcpy(values[1], exp_avg_sq + i, sizeof(float) * rest);
    uint8_t codes[2][kQuantizationBlock];
    uint8_t* padded[] = {codes[0], codes[1]};
    quantize(values[0], values[1], block.scales, padded, step);
    for (int j = 0; j < 2; ++j) std::memcpy(block.codes[j], codes[j], rest);
  }
}

// The elements of one tile in fp32: in the state where it is stored so, else in memory of its own.
class Tile {
 public:
  float* master;
  float* exp_avg;
  float* exp_avg_sq;

  void load(const StoredState& state, int64_t at, int count) {
    master = memory_[0], exp_avg = memory_[1], exp_avg_sq = memory_[2];
    if (state.split) {
      join((const uint16_t*)state.weights + at, (const int16_t*)state.master + at, master, count);
    } else {
      master = (float*)state.master + at;
    }
    if (state.moments == kFloat32) {
      exp_avg = (float*)state.exp_avg + at, exp_avg_sq = (float*)state.exp_avg_sq + at;
    } else {
      decode_moments(state, at, count, exp_avg, exp_avg_sq);
    }
  }

  // The weights of split masters are written by others, with the rounding of `nearest_bfloat16`.
  void store(const StoredState& state, int64_t at, int count, uint32_t step) const {
    if (state.split) split(master, (int16_t*)state.master + at, count);
    if (state.moments != kFloat32) encode_moments(state, at, count, exp_avg, exp_avg_sq, step);
  }

 private:
  float memory_[3][kTile];
};

}  // namespace zenflow
