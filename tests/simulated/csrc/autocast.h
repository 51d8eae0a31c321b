// torch.autocast("sim"): the operators that CUDA casts, as far as models here use them.

#pragma once

#include "operators.h"

// Declared here: the header includes all of ATen.
namespace at::autocast {
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(c10::DeviceType device_type);
}  // namespace at::autocast

namespace sim {

constexpr const char* kLowerPrecision[] = {
    "_convolution", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear",
    "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention"};

constexpr const char* kFloat32[] = {
    "binary_cross_entropy_with_logits", "exp", "group_norm", "kl_div", "l1_loss", "layer_norm", "log", "log_softmax.int",
    "logsumexp", "mse_loss", "nll_loss", "nll_loss_nd", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "rms_norm",
    "smooth_l1_loss", "softmax.int", "softplus", "sum", "sum.dim_IntList"};

inline void call_with_dtype(const OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, c10::DeviceType::PrivateUse1);
    });
  }
  op.callBoxed(stack);
}

inline void call_in_lower_precision(const OperatorHandle& op, Stack* stack) {
  call_with_dtype(op, stack, at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1));
}

inline void call_in_float32(const OperatorHandle& op, Stack* stack) { call_with_dtype(op, stack, at::kFloat); }

}  // namespace sim
