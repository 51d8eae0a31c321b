// Optimizer state in fewer bytes, as runtime/state_forms.py describes it: conversion from and to fp32.
//
// Whole blocks are converted in registers, in the loop of the update: integer units convert while the divider works. Parts
// of a block go through memory. Results depend on the values alone, not on where they are, how ranges are cut, or the
// width of vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace zenflow {

constexpr int kQuantizationBlock = 32;  // QUANTIZATION_BLOCK in planning/plan.py
constexpr int kBlockVectors = kQuantizationBlock / kLanes;
constexpr int kTile = 512;  // most elements that are converted in memory at a time: they stay in the L1 cache

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

inline Floats join(const uint16_t* weights, const int16_t* rest) {
  const Ints low = (Ints)(load_halves((const uint16_t*)rest) << 16) >> 16;  // with its sign
  return (Floats)((load_halves(weights) << 16) + (Words)low);
}

// Stores what the cast of `BFloat16` takes away.
inline void split(Floats master, int16_t* rest) {
  const Words weight = nearest_bfloat16(master) << 16;
  const Ints left = (Ints)((Words)master - weight);
  const Ints fits = left > 32767 ? 32767 : left;  // a tie that was rounded down: one fp32 ulp lower
  store_halves((uint16_t*)rest, (Words)(master != master ? 0 : fits));
}

// ---- moments in bf16

inline void store_rounded(uint16_t* to, Floats values, Words half) {
  // Infinite numbers stay so: the bits that are cut off are zeros.
  store_halves(to, values != values ? 0x7fc0u : ((Words)values + half) >> 16);
}

inline void narrow(Floats exp_avg, Floats exp_avg_sq, uint16_t* to, uint16_t* to_sq, uint32_t step) {
  const Words random = random_bits((Words)exp_avg, (Words)exp_avg_sq, step);
  store_rounded(to, exp_avg, random & 0xffff);
  store_rounded(to_sq, exp_avg_sq, random >> 16);
}

// ---- moments in 8 bits

// A code without its sign is 4 bits of exponent and `kMantissa` of mantissa, of a number in [0, 1]: the largest exponent
// stands for 2^0, the smallest one for subnormal numbers.
constexpr int kMantissa = 3, kMantissaSquare = 4;
constexpr uint32_t kSmallestNormal = (127 - 14) << 23;  // the bits of 2^-14
constexpr uint32_t kExponents = (127 - 15) << 23;       // from those of a code to those of fp32

// Of numbers in [0, 1], rounded up if the bits of `random` below a code's last one carry.
template <int mantissa>
inline Words code_of(Floats value, Words random) {
  // Below the smallest normal number, the sum has the number in its last bits, and is the larger one of the two.
  const Ints subnormal = (Ints)(value + bits_as<float>(kSmallestNormal)) - (int32_t)kSmallestNormal;
  const Ints normal = (Ints)value - (int32_t)kExponents;
  return ((Words)(normal > subnormal ? normal : subnormal) + random) >> (23 - mantissa);
}

template <int mantissa>
inline Floats value_of(Words code) {
  const Words bits = code << (23 - mantissa);
  const Ints normal = (Ints)(bits + kExponents);
  // The smaller one of the two below the smallest normal number.
  const Ints subnormal = (Ints)((Floats)(bits + kSmallestNormal) - bits_as<float>(kSmallestNormal));
  return (Floats)(subnormal < normal ? subnormal : normal);
}

// The scale of a block, as the exponent bits of a power of two that is not below any magnitude; 0 if all are too small for
// one, kLost if one is too large or not finite: then all of the block is lost, and not one element.
constexpr uint32_t kLost = 255;

inline uint8_t scale_of(const Floats* values) {
  Words most{};  // bits of floats without a sign are in the order of the floats
  each_vector<kBlockVectors>([&](int i) {
    const Words magnitude = (Words)values[i] & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  });
  const uint32_t bits = largest(most), exponent = (bits + 0x7fffffu) >> 23;
  return (uint8_t)(bits < 0x00800000u ? 0 : exponent >= 254 ? kLost : exponent);
}

inline float power(uint32_t scale) { return scale == kLost ? __builtin_nanf("") : bits_as<float>(scale << 23); }
inline float inverse(uint32_t scale) { return scale == 0 || scale == kLost ? 0.0f : bits_as<float>((254 - scale) << 23); }

// Stores the scales and the codes of one quantization block.
inline void quantize(const Floats* exp_avg, const Floats* exp_avg_sq, uint8_t* const scales[2], uint8_t* const codes[2],
                     uint32_t step) {
  const uint32_t scale = *scales[0] = scale_of(exp_avg), scale_sq = *scales[1] = scale_of(exp_avg_sq);
  const float by = inverse(scale), by_sq = inverse(scale_sq);
  each_vector<kBlockVectors>([&](int i) {
    const Words moment = (Words)exp_avg[i];
    const Words random = random_bits(moment, (Words)exp_avg_sq[i], step);
    const Words code = code_of<kMantissa>((Floats)(moment & 0x7fffffffu) * by, random & 0xfffffu);
    store_bytes(codes[0] + i * kLanes, code | (moment >> 24 & 0x80u));
    const Floats value_sq = exp_avg_sq[i] * by_sq;
    const Words code_sq = code_of<kMantissaSquare>(value_sq, random >> 13);
    // Hazard: a second moment of 0 divides the first one by eps alone.
    const Words least = (Words)value_sq < 1u ? (Words)value_sq : 1u;
    store_bytes(codes[1] + i * kLanes, code_sq > least ? code_sq : least);
  });
  if (scale == kLost) std::memset(codes[0], 0, kQuantizationBlock);
  if (scale_sq == kLost) std::memset(codes[1], 0, kQuantizationBlock);
}

// Loads one quantization block.
inline void expand(uint8_t* const scales[2], uint8_t* const codes[2], Floats* exp_avg, Floats* exp_avg_sq) {
  const float by = power(*scales[0]), by_sq = power(*scales[1]);
  each_vector<kBlockVectors>([&](int i) {
    const Words code = load_bytes(codes[0] + i * kLanes);
    const Words magnitude = (Words)(value_of<kMantissa>(code & 0x7f) * by);
    exp_avg[i] = (Floats)(magnitude | (code << 24 & 0x80000000u));
    exp_avg_sq[i] = value_of<kMantissaSquare>(load_bytes(codes[1] + i * kLanes)) * by_sq;
  });
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

  Block() = default;
  Block(const StoredState& state, int64_t at) {
    const BlockPlace place = place_of(state, at);
    uint8_t* const moments[] = {(uint8_t*)state.exp_avg, (uint8_t*)state.exp_avg_sq};
    for (int i = 0; i < 2; ++i) scales[i] = moments[i] + place.scale, codes[i] = moments[i] + place.codes;
  }

  void next() {
    for (int i = 0; i < 2; ++i) scales[i] += 1, codes[i] += kQuantizationBlock;
  }
};

// ---- parts of blocks, through memory

// Calls `convert(at, count)` for consecutive parts of `count` elements of at most `most`.
template <class Convert>
inline void in_parts(int count, int most, Convert convert) {
  for (int at = 0; at < count; at += most) convert(at, count - at < most ? count - at : most);
}

inline void decode_moments(const StoredState& state, int64_t at, int count, float* exp_avg, float* exp_avg_sq) {
  if (state.moments == kBFloat16) {
    const auto *from = (const uint16_t*)state.exp_avg + at, *from_sq = (const uint16_t*)state.exp_avg_sq + at;
    return in_parts(count, kLanes, [&](int i, int n) {
      store_some<Float32>(exp_avg + i, load_some<BFloat16>(from + i, n), n);
      store_some<Float32>(exp_avg_sq + i, load_some<BFloat16>(from_sq + i, n), n);
    });
  }
  Block block(state, at);
  in_parts(count, kQuantizationBlock, [&](int i, int n) {
    uint8_t codes[2][kQuantizationBlock] = {};
    for (int j = 0; j < 2; ++j) std::memcpy(codes[j], block.codes[j], n);
    uint8_t* const padded[] = {codes[0], codes[1]};
    Floats values[2][kBlockVectors];
    expand(block.scales, padded, values[0], values[1]);
    std::memcpy(exp_avg + i, values[0], sizeof(float) * n);
    std::memcpy(exp_avg_sq + i, values[1], sizeof(float) * n);
    block.next();
  });
}

inline void encode_moments(const StoredState& state, int64_t at, int count, const float* exp_avg, const float* exp_avg_sq,
                           uint32_t step) {
  if (state.moments == kBFloat16) {
    auto *to = (uint16_t*)state.exp_avg + at, *to_sq = (uint16_t*)state.exp_avg_sq + at;
    return in_parts(count, kLanes, [&](int i, int n) {
      uint16_t rounded[2][kLanes];
      narrow(load_some<Float32>(exp_avg + i, n), load_some<Float32>(exp_avg_sq + i, n), rounded[0], rounded[1], step);
      std::memcpy(to + i, rounded[0], sizeof *to * n);
      std::memcpy(to_sq + i, rounded[1], sizeof *to * n);
    });
  }
  Block block(state, at);
  in_parts(count, kQuantizationBlock, [&](int i, int n) {
    Floats values[2][kBlockVectors] = {};
    std::memcpy(values[0], exp_avg + i, sizeof(float) * n);
    std::memcpy(values[1], exp_avg_sq + i, sizeof(float) * n);
    uint8_t codes[2][kQuantizationBlock];
    uint8_t* const padded[] = {codes[0], codes[1]};
    quantize(values[0], values[1], block.scales, padded, step);
    for (int j = 0; j < 2; ++j) std::memcpy(block.codes[j], codes[j], n);
    block.next();
  });
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
      const auto *weights = (const uint16_t*)state.weights + at;
      const auto *rest = (const int16_t*)state.master + at;
      in_parts(count, kLanes, [&](int i, int n) {
        uint16_t of_weights[kLanes] = {};
        int16_t of_rest[kLanes] = {};
        std::memcpy(of_weights, weights + i, sizeof *weights * n);
        std::memcpy(of_rest, rest + i, sizeof *rest * n);
        store_some<Float32>(master + i, join(of_weights, of_rest), n);
      });
    } else {
      master = (float*)state.master + at;
    }
    if (state.moments == kFloat32) {
      exp_avg = (float*)state.exp_avg + at, exp_avg_sq = (float*)state.exp_avg_sq + at;
    } else {
      decode_moments(state, at, count, exp_avg, exp_avg_sq);
    }
  }

  // The weights of split masters are written by others, with the cast of `BFloat16`.
  void store(const StoredState& state, int64_t at, int count, uint32_t step) const {
    if (state.split) {
      auto* const rest = (int16_t*)state.master + at;
      in_parts(count, kLanes, [&](int i, int n) {
        int16_t of_rest[kLanes];
        split(load_some<Float32>(master + i, n), of_rest);
        std::memcpy(rest + i, of_rest, sizeof *rest * n);
      });
    }
    if (state.moments != kFloat32) encode_moments(state, at, count, exp_avg, exp_avg_sq, step);
  }

 private:
  float memory_[3][kTile];
};

// ---- whole blocks, in registers

// The state from element `begin` on, block after block; 8-bit moments of one slice.
template <bool kSplit, int kMoments>
class StoredBlocks {
 public:
  StoredBlocks(const StoredState& state, int64_t begin, uint32_t step)
      : state_(state), step_(step), block_(kMoments == kInt8 ? Block(state, begin) : Block()) {}

  void load(int64_t at, Floats* exp_avg, Floats* exp_avg_sq) const {
    if constexpr (kMoments == kInt8) {
      Block block = block_;
      each_vector<kVectors / kBlockVectors>([&](int i) {
        expand(block.scales, block.codes, exp_avg + i * kBlockVectors, exp_avg_sq + i * kBlockVectors);
        block.next();
      });
    } else {
      using Moment = std::conditional_t<kMoments == kFloat32, Float32, BFloat16>;
      each_vector<kVectors>([&](int i) {
        exp_avg[i] = Moment::load((const typename Moment::Element*)state_.exp_avg + at + i * kLanes);
        exp_avg_sq[i] = Moment::load((const typename Moment::Element*)state_.exp_avg_sq + at + i * kLanes);
      });
    }
  }

  void store(int64_t at, const Floats* exp_avg, const Floats* exp_avg_sq) {
    if constexpr (kMoments == kInt8) {
      each_vector<kVectors / kBlockVectors>([&](int i) {
        quantize(exp_avg + i * kBlockVectors, exp_avg_sq + i * kBlockVectors, block_.scales, block_.codes, step_);
        block_.next();
      });
    } else {
      each_vector<kVectors>([&](int i) {
        const int64_t here = at + i * kLanes;
        if constexpr (kMoments == kBFloat16) {
          narrow(exp_avg[i], exp_avg_sq[i], (uint16_t*)state_.exp_avg + here, (uint16_t*)state_.exp_avg_sq + here, step_);
        } else {
          Float32::store((float*)state_.exp_avg + here, exp_avg[i]);
          Float32::store((float*)state_.exp_avg_sq + here, exp_avg_sq[i]);
        }
      });
    }
  }

  Floats master(int64_t at) const {
    if constexpr (kSplit) return join((const uint16_t*)state_.weights + at, (const int16_t*)state_.master + at);
    return Float32::load((const float*)state_.master + at);
  }

  void store_master(int64_t at, Floats master) {
    if constexpr (kSplit) {
      split(master, (int16_t*)state_.master + at);
    } else {
      Float32::store((float*)state_.master + at, master);
    }
  }

 private:
  const StoredState& state_;
  const uint32_t step_;
  Block block_;
};

}  // namespace zenflow
