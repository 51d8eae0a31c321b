// Optimizer state in fewer bytes, as runtime/host/state_forms.py describes it: conversion from and to fp32.
//
// The loops have no branches on values, so that compilers vectorize them. Results depend on the values alone, not on
// where they are or how ranges are cut.
#pragma once

#include <cstdint>
#include <cstring>

namespace zenflow {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

constexpr int kQuantizationBlock = 128;  // QUANTIZATION_BLOCK in planning/plan.py
constexpr int kTile = 512;               // most elements that are converted at a time: they stay in the L1 cache

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

inline uint32_t mixed(uint32_t bits) {  // "lowbias32" of C. Wellons, Prospecting for Hash Functions (2018)
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits *= 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// 32 bits that decide how two moments are rounded: a function of the moments and the step.
inline uint32_t random_bits(float exp_avg, float exp_avg_sq, uint32_t step) {
  const uint32_t other = mixed(bits_as<uint32_t>(exp_avg_sq) + step * 0x9e3779b9u);
  return mixed(bits_as<uint32_t>(exp_avg) ^ other);
}

inline float uniform(uint32_t half) { return ((float)(int32_t)half + 0.5f) * 0x1p-16f; }  // of 16 bits, in (0, 1)

// ---- split masters

inline uint16_t nearest_bfloat16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

inline void join(const uint16_t* weights, const int16_t* rest, float* to, int count) {
  for (int i = 0; i < count; ++i) {
    to[i] = bits_as<float>(((uint32_t)weights[i] << 16) + (uint32_t)(int32_t)rest[i]);
  }
}

inline void split(const float* from, int16_t* rest, int count) {
  for (int i = 0; i < count; ++i) {
    const uint32_t weight = (uint32_t)nearest_bfloat16(from[i]) << 16;
    const int32_t left = (int32_t)(bits_as<uint32_t>(from[i]) - weight);
    const int32_t fits = left > 32767 ? 32767 : left;  // a tie that was rounded down: one fp32 ulp lower
    rest[i] = (int16_t)(from[i] != from[i] ? 0 : fits);
  }
}

// ---- moments in bf16

inline void widen(const uint16_t* from, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = bits_as<float>((uint32_t)from[i] << 16);
}

inline uint16_t rounded_bfloat16(float value, uint32_t half) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t up = (bits & 0x7f800000u) == 0x7f800000u ? 0 : half;  // infinite, or NaN
  return (uint16_t)(value != value ? 0x7fc0u : (bits + up) >> 16);
}

inline void narrow(const float* exp_avg, const float* exp_avg_sq, uint16_t* to, uint16_t* to_sq, int count, uint32_t step) {
  for (int i = 0; i < count; ++i) {
    const uint32_t random = random_bits(exp_avg[i], exp_avg_sq[i], step);
    to[i] = rounded_bfloat16(exp_avg[i], random & 0xffff);
    to_sq[i] = rounded_bfloat16(exp_avg_sq[i], random >> 16);
  }
}

// ---- moments in 8 bits

constexpr float kMost = 127.0f, kMostSquare = 255.0f;  // the largest codes

inline float level(int32_t code, float scale) {
  return scale * ((float)(code * code) * (1.0f / (kMost * kMost)));
}

inline float level_sq(int32_t code, float scale) {
  const float square = (float)(code * code) * (1.0f / (kMostSquare * kMostSquare));
  return scale * (square * square);
}

// The largest magnitude; NaN if one is not finite, so that all of the block is lost and not one element; 0 if it is too
// small for its reciprocal.
inline float scale_of(const float* values, int count) {
  uint32_t most = 0;  // bits of floats without a sign are in the order of the floats
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_as<uint32_t>(values[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  if (most >= 0x7f800000u) return __builtin_nanf("");
  return most < 0x00800000u ? 0.0f : bits_as<float>(most);
}

inline int32_t at_most(int32_t value, int32_t most) { return value < most ? value : most; }

// Codes of one quantization block, or of the rest of a slice.
inline void quantize(const float* exp_avg, const float* exp_avg_sq, float scale, float scale_sq, int8_t* to, uint8_t* to_sq,
                     int count, uint32_t step) {
  const bool any = scale > 0.0f, any_sq = scale_sq > 0.0f;  // not if it is NaN
  const float by = any ? 1.0f / scale : 0.0f, by_sq = any_sq ? 1.0f / scale_sq : 0.0f;
  for (int i = 0; i < count; ++i) {
    const uint32_t random = random_bits(exp_avg[i], exp_avg_sq[i], step);

    const float magnitude = any ? __builtin_fabsf(exp_avg[i]) : 0.0f;
    const int32_t low = at_most((int32_t)(__builtin_sqrtf(magnitude * by) * kMost), (int32_t)kMost - 1);
    const float from = level(low, scale), up_to = level(low + 1, scale);
    const int32_t code = low + (magnitude - from > uniform(random & 0xffff) * (up_to - from));
    to[i] = (int8_t)(exp_avg[i] < 0.0f ? -code : code);

    const float value = any_sq ? exp_avg_sq[i] : 0.0f;
    const float root = __builtin_sqrtf(__builtin_sqrtf(value * by_sq));
    const int32_t low_sq = at_most((int32_t)(root * kMostSquare), (int32_t)kMostSquare - 1);
    const float from_sq = level_sq(low_sq, scale_sq), up_to_sq = level_sq(low_sq + 1, scale_sq);
    const int32_t code_sq = low_sq + (value - from_sq > uniform(random >> 16) * (up_to_sq - from_sq));
    // Hazard: a second moment of 0 divides the first one by eps alone.
    to_sq[i] = (uint8_t)(code_sq == 0 && value * by_sq > 0.0f ? 1 : code_sq);
  }
}

inline void expand(const int8_t* from, const uint8_t* from_sq, float scale, float scale_sq, float* to, float* to_sq,
                   int count) {
  for (int i = 0; i < count; ++i) {
    const int32_t code = from[i];
    const float magnitude = level(code, scale);
    to[i] = code < 0 ? -magnitude : magnitude;
    to_sq[i] = level_sq(from_sq[i], scale_sq);
  }
}

// Where the codes and the scale of a quantization block are. A slice begins with its scales.
struct BlockPlace {
  int64_t codes;  // bytes
  int64_t scale;
};

inline BlockPlace place_of(const StoredState& state, int64_t at) {
  const int64_t blocks = (state.length + kQuantizationBlock - 1) / kQuantizationBlock;
  const int64_t slice = at / state.length, column = at % state.length;
  const int64_t begin = slice * (state.length + (int64_t)sizeof(float) * blocks);
  return {begin + (int64_t)sizeof(float) * blocks + column,
          begin + (int64_t)sizeof(float) * (column / kQuantizationBlock)};
}

// ---- all of it

// End of the tile that begins at element `at`: of 8-bit moments, it is inside of one quantization block.
inline int64_t tile_end(const StoredState& state, int64_t at, int64_t end) {
  int64_t stop = at + kTile;
  if (state.moments == kInt8) {
    const int64_t column = at % state.length, block_end = (column / kQuantizationBlock + 1) * kQuantizationBlock;
    stop = at - column + (block_end < state.length ? block_end : state.length);
  }
  return stop < end ? stop : end;
}

// Converts the elements of one tile to fp32.
inline void decode(const StoredState& state, int64_t at, int count, float* master, float* exp_avg, float* exp_avg_sq) {
  if (state.split) {
    join((const uint16_t*)state.weights + at, (const int16_t*)state.master + at, master, count);
  } else {
    std::memcpy(master, (const float*)state.master + at, sizeof(float) * count);
  }
  if (state.moments == kFloat32) {
    std::memcpy(exp_avg, (const float*)state.exp_avg + at, sizeof(float) * count);
    std::memcpy(exp_avg_sq, (const float*)state.exp_avg_sq + at, sizeof(float) * count);
  } else if (state.moments == kBFloat16) {
    widen((const uint16_t*)state.exp_avg + at, exp_avg, count);
    widen((const uint16_t*)state.exp_avg_sq + at, exp_avg_sq, count);
  } else {
    const BlockPlace place = place_of(state, at);
    float scale, scale_sq;
    std::memcpy(&scale, (const char*)state.exp_avg + place.scale, sizeof scale);
    std::memcpy(&scale_sq, (const char*)state.exp_avg_sq + place.scale, sizeof scale_sq);
    expand((const int8_t*)state.exp_avg + place.codes, (const uint8_t*)state.exp_avg_sq + place.codes, scale, scale_sq,
           exp_avg, exp_avg_sq, count);
  }
}

// Stores the elements of one tile; of 8-bit moments, it covers a quantization block. The weights of split masters are
// written by others, with the rounding of `nearest_bfloat16`.
inline void encode(const StoredState& state, int64_t at, int count, const float* master, const float* exp_avg,
                   const float* exp_avg_sq, uint32_t step) {
  if (state.split) {
    split(master, (int16_t*)state.master + at, count);
  } else {
    std::memcpy((float*)state.master + at, master, sizeof(float) * count);
  }
  if (state.moments == kFloat32) {
    std::memcpy((float*)state.exp_avg + at, exp_avg, sizeof(float) * count);
    std::memcpy((float*)state.exp_avg_sq + at, exp_avg_sq, sizeof(float) * count);
  } else if (state.moments == kBFloat16) {
    narrow(exp_avg, exp_avg_sq, (uint16_t*)state.exp_avg + at, (uint16_t*)state.exp_avg_sq + at, count, step);
  } else {
    const BlockPlace place = place_of(state, at);
    const float scale = scale_of(exp_avg, count), scale_sq = scale_of(exp_avg_sq, count);
    std::memcpy((char*)state.exp_avg + place.scale, &scale, sizeof scale);
    std::memcpy((char*)state.exp_avg_sq + place.scale, &scale_sq, sizeof scale_sq);
    quantize(exp_avg, exp_avg_sq, scale, scale_sq, (int8_t*)state.exp_avg + place.codes,
             (uint8_t*)state.exp_avg_sq + place.codes, count, step);
  }
}

}  // namespace zenflow
