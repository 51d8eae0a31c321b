// Numbers: every aten operator of CUDA tensors runs as its CPU kernel on the same memory, after the current stream's
// work. fill_ and zero_ are queued, so that they wait for nothing, as on a device.
//
// An index that is out of bounds kills the device, as the assertion in a kernel does: the operator returns, and later
// calls fail.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Copy.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>
#include <dlfcn.h>

#include <cstring>
#include <set>

namespace at::native {
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking);
}

namespace {

using c10::IValue;

template <class F>
F core(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

void* current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStream(device).native_handle();
}

// On a device no launch waits. This one does, so it releases Python's lock: the stream may wait for a thread that needs
// it.
void wait_for_current_stream(c10::Device device) {
  static const auto wait = core<void (*)(void*)>("fake_gpu_wait_uncounted");
  static const auto has_lock = core<int (*)()>("PyGILState_Check");
  static const auto release = core<void* (*)()>("PyEval_SaveThread");
  static const auto take = core<void (*)(void*)>("PyEval_RestoreThread");
  void* state = has_lock() ? release() : nullptr;
  wait(current_stream(device));
  if (state != nullptr) take(state);
}

char* address_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.unsafeGetTensorImpl()->storage().data_ptr().get()) +
         tensor.storage_offset() * tensor.itemsize();
}

// The same memory as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  static char nothing;
  void* memory = tensor.numel() != 0 ? address_of(tensor) : &nothing;
  auto alias = at::from_blob(
      memory, tensor.sizes(), tensor.strides(), [tensor](void*) {},
      at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

// A CPU result in device memory.
at::Tensor on_device(const at::Tensor& result, c10::Device device) {
  if (!result.defined()) return result;
  const at::Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  at::Tensor found = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device));
  if (dense.numel() != 0) std::memcpy(address_of(found), dense.const_data_ptr(), dense.numel() * dense.itemsize());
  return found;
}

c10::Device device_of(const std::vector<IValue>& arguments) {
  for (const IValue& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) return value.toTensor().device();
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined() && tensor.is_cuda()) return tensor.device();
    }
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getDevice();
}

IValue argument_on_cpu(const IValue& value) {
  if (value.isTensor()) return on_cpu(value.toTensor());
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = on_cpu(tensor);
    return c10::List<at::Tensor>(tensors);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      found.push_back(tensor ? std::optional<at::Tensor>(on_cpu(*tensor)) : std::nullopt);
    }
    return found;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isGenerator()) return IValue();
  return value;
}

// Every index replaced by 0.
IValue in_bounds(const IValue& value) {
  const auto zeroed = [](const at::Tensor& tensor) {
    return tensor.defined() && at::isIntegralType(tensor.scalar_type(), false) ? at::zeros_like(tensor) : tensor;
  };
  if (value.isTensor()) return zeroed(value.toTensor());
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<at::Tensor>> found;
  for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
    found.push_back(tensor ? std::optional<at::Tensor>(zeroed(*tensor)) : std::nullopt);
  }
  return found;
}

void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t begin) {
  const at::AutoDispatchBelowAutograd below;
  const torch::jit::Stack arguments(stack->begin() + begin, stack->end());
  try {
    op.callBoxed(stack);
  } catch (const c10::IndexError&) {
    static const auto die = core<void (*)()>("fake_gpu_die");
    die();
    stack->resize(begin);
    for (const IValue& each : arguments) stack->push_back(in_bounds(each));
    op.callBoxed(stack);
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const std::vector<IValue> given(stack->begin() + begin, stack->end());
  const c10::Device device = device_of(given);
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // as after each launch: an error that nobody has asked for shows here
  wait_for_current_stream(device);
  std::vector<std::pair<size_t, at::Tensor>> resized;  // empty out= arguments, which the operator resizes
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    IValue& value = (*stack)[begin + i];
    if (written && argument.kwarg_only() && value.isTensor() && value.toTensor().is_cuda() &&
        value.toTensor().numel() == 0) {
      resized.emplace_back(i, at::empty({0}, value.toTensor().options().device(at::kCPU)));
      value = resized.back().second;
    } else {
      value = argument_on_cpu(value);
    }
  }
  call_on_cpu(op, stack, begin);
  for (const auto& [i, found] : resized) {
    at::Tensor out = given[i].toTensor();
    out.resize_(found.sizes());
    if (found.numel() != 0) std::memcpy(address_of(out), found.const_data_ptr(), found.numel() * found.itemsize());
  }
  const size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    IValue& value = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {  // one of the arguments itself
      for (size_t j = 0; j < count; ++j) {
        const auto* other = schema.arguments()[j].alias_info();
        if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
          value = given[j];
          break;
        }
      }
    } else if (value.isTensor()) {
      value = on_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = on_device(tensor, device);
      value = c10::List<at::Tensor>(tensors);
    }
  }
}

// Has a kernel for CUDA alone. (Zhang and Sennrich, arXiv:1910.07467)
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& gradient, const at::Tensor& input, c10::IntArrayRef shape, const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight, std::array<bool, 2> wanted) {
  wait_for_current_stream(input.device());
  const auto g = on_cpu(gradient).to(at::kFloat), scale = on_cpu(rstd).to(at::kFloat);
  const auto normed = on_cpu(input).to(at::kFloat) * scale;
  const bool has_weight = weight.has_value() && weight->defined();
  const auto scaled = has_weight ? g * on_cpu(*weight).to(at::kFloat) : g;
  std::vector<int64_t> inner, outer;
  const int64_t first = input.dim() - static_cast<int64_t>(shape.size());
  for (int64_t dim = 0; dim < input.dim(); ++dim) (dim < first ? outer : inner).push_back(dim);
  at::Tensor of_input, of_weight;
  if (wanted[0]) {
    const auto found = (scaled - normed * (scaled * normed).mean(inner, true)) * scale;
    of_input = on_device(found.to(input.scalar_type()), input.device());
  }
  if (wanted[1] && has_weight) {
    of_weight = on_device((g * normed).sum(outer).to(weight->scalar_type()), input.device());
  }
  return {of_input, of_weight};
}

// The kernel for the CPU takes no integers.
at::Tensor histc(const at::Tensor& self, int64_t bins, const c10::Scalar& low, const c10::Scalar& high) {
  wait_for_current_stream(self.device());
  const auto values = on_cpu(self);
  const bool integral = at::isIntegralType(values.scalar_type(), /*includeBool=*/false);
  const auto found = at::histc(integral ? values.to(at::kDouble) : values, bins, low, high);
  return on_device(found.to(self.scalar_type()), self.device());
}

// An operator whose kernels are for CUDA alone would compute nothing.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake GPU cannot compute ", op.schema().name(), ": it has no kernel for the CPU");
}

// What the CPU must not do in place of CUDA: make, view and resize memory, and move numbers between devices.
const std::set<std::string> kOfCuda = {
    "aten::_copy_from",     "aten::_copy_from_and_resize", "aten::_efficientzerotensor", "aten::_fused_sdp_choice",
    "aten::_local_scalar_dense", "aten::_pin_memory",      "aten::_reshape_alias",       "aten::_resize_output_",
    "aten::_to_copy",       "aten::as_strided",            "aten::copy_",                "aten::empty",
    "aten::empty_like",     "aten::empty_strided",         "aten::fill_",                "aten::is_pinned",
    "aten::is_set_to",      "aten::record_stream",         "aten::resize_",              "aten::resize_as_",
    "aten::set_",           "aten::unfold",                "aten::view",                 "aten::view_as_complex",
    "aten::view_as_real",   "aten::zero_"};

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool by_kernel = self.dtype() != source.dtype() || !self.is_contiguous() || !source.is_contiguous() ||
                         self.sizes() != source.sizes();
  if (self.is_cuda() && source.is_cuda() && by_kernel) {
    wait_for_current_stream(self.device());
    auto alias = on_cpu(self);
    alias.copy_(on_cpu(source));
    return self;
  }
  return at::native::copy_(self, source, non_blocking);
}

struct Fill {
  at::Tensor target;
  c10::Scalar value;
};

at::Tensor& fill(at::Tensor& self, const c10::Scalar& value) {
  static const auto push = core<void (*)(void*, void (*)(void*), void*)>("fake_gpu_push");
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  // The alias holds no reference to the tensor: the caching allocator frees memory in stream order.
  auto alias = at::from_blob(self.numel() != 0 ? address_of(self) : reinterpret_cast<char*>(&self), self.sizes(),
                             self.strides(), at::TensorOptions().dtype(self.dtype()).device(at::kCPU));
  push(
      current_stream(self.device()),
      [](void* argument) {
        auto* work = static_cast<Fill*>(argument);
        const at::AutoDispatchBelowAutograd below;
        work->target.fill_(work->value);
        delete work;
      },
      new Fill{alias, value});
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

}  // namespace

// Returns how many operators run on the CPU from now on. torch.cuda must have been used before.
extern "C" int fake_gpu_install_operators() {
  static auto& kept = *new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto install = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
    kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "fake GPU"));
  };
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kOfCuda.count(name.name) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (!has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::CompositeExplicitAutograd) &&
        !has(c10::DispatchKey::CompositeImplicitAutograd)) {
      if (name.name == "aten::_fused_rms_norm_backward") continue;
      install(name, c10::KernelFunction::makeFromBoxedFunction<&refuse>());
      continue;
    }
    install(name, c10::KernelFunction::makeFromBoxedFunction<&fallback>());
  }
  install({"aten::copy_", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy));
  install({"aten::_fused_rms_norm_backward", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&rms_norm_backward));
  install({"aten::histc", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&histc));
  install({"aten::fill_", "Scalar"}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&fill));
  install({"aten::zero_", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&zero));
  return static_cast<int>(kept.size());
}
