// Copies between tensors, with CUDA's rules for what blocks and when host memory is read.
//
// [Note: Copies between host and device]
// at::native::copy_ on CUDA (aten/src/ATen/native/cuda/Copy.cu) copies directly if dtype and layout are the same, and
// makes temporaries otherwise. A direct copy is a cudaMemcpyAsync, which for pageable memory
//   - to the device: reads the source before it returns, into a staging buffer;
//   - to the host: returns when the copy is done.
// For pinned memory it returns at once, and the bytes are read or written when the copy's turn comes.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "tensors.h"

namespace sim {

inline void wait_for(uint64_t position, const char* why) {
  Counts::get().add(why);
  Queues::get().synchronize_position(current_stream(), position);
}

inline void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  CpuViews view;
  at::Tensor target = view(to), source = view(from);
  launch("copy D2D", [target, source]() mutable { target.copy_(source); });
}

inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

inline void copy_direct(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const size_t bytes = to.nbytes();
  void* target = to.mutable_data_ptr();
  const void* source = from.const_data_ptr();
  const auto copy = [target, source, bytes] { std::memcpy(target, source, bytes); };
  const bool to_host = on_device(from);
  const void* host = to_host ? target : source;
  const bool pinned = HostMemory::get().contains(host, bytes);
  if (!non_blocking) {
    wait_for(launch(to_host ? "copy D2H" : "copy H2D", copy), to_host ? "D2H" : "H2D");
  } else if (pinned) {
    const uint64_t position = launch(to_host ? "copy D2H (pinned)" : "copy H2D (pinned)", copy);
    HostMemory::get().record_use(host, bytes, {current_stream(), position});
  } else if (to_host) {
    wait_for(launch("copy D2H (pageable)", copy), "D2H pageable");
  } else {
    auto staged = std::make_shared<std::vector<char>>(bytes);
    std::memcpy(staged->data(), source, bytes);
    launch("copy H2D (staged)", [target, staged, bytes] { std::memcpy(target, staged->data(), bytes); });
  }
}

inline at::Tensor contiguous_copy_target(const at::Tensor& like, c10::ScalarType dtype) {
  return at::empty(like.sizes(), like.options().dtype(dtype));
}

inline void copy_between(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool same_type = to.scalar_type() == from.scalar_type();
  if (same_type && same_layout(to, from)) return copy_direct(to, from, non_blocking);
  // A blocking copy converts dtypes on the host, another one on the device: as CUDA does.
  const bool convert_at_source = on_device(from) == non_blocking;
  at::Tensor target, source;
  if (convert_at_source) {
    target = to.is_contiguous() ? to : contiguous_copy_target(to, to.scalar_type());
    source = from.to(to.scalar_type()).contiguous();
  } else {
    target = to.is_contiguous() && same_type ? to : contiguous_copy_target(to, from.scalar_type());
    source = from.contiguous();
  }
  copy_direct(target, source, non_blocking);
  if (!target.is_same(to)) to.copy_(target, non_blocking);
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  TORCH_CHECK(
      !self.is_meta() && !from.is_meta() && (on_device(self) || self.is_cpu()) && (on_device(from) || from.is_cpu()),
      "cannot copy from ", from.device(), " to ", self.device());
  Queues::get().check_alive();
  const at::Tensor source = from.sizes() == self.sizes() ? from : from.expand(self.sizes());
  if (self.numel() == 0) return self;
  if (on_device(self) && on_device(from)) {
    copy_on_device(self, source);
  } else {
    copy_between(self, source, non_blocking);
  }
  return self;
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, self, non_blocking);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::Tensor target = to;
  if (target.numel() == 0) target.resize_(self.sizes());
  return copy_(target, self, false);
}

}  // namespace sim
