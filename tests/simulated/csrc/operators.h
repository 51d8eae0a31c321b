// Runs any operator by its CPU kernel: shapes now, from a rehearsal; values when the stream gets there.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "copies.h"

namespace sim {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// What the fallback knows of an operator from its schema.
struct OperatorInfo {
  explicit OperatorInfo(const OperatorHandle& handle) : op(handle) {
    const auto& schema = handle.schema();
    base_name = schema.name().substr(schema.name().find("::") + 2);
    name = base_name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    for (const auto& argument : schema.arguments()) {
      const c10::AliasInfo* alias = argument.alias_info();
      written.push_back(alias && alias->isWrite());
      is_out.push_back(written.back() && argument.is_out());
      is_generator.push_back(argument.type()->str().find("Generator") != std::string::npos);
      has_generator |= is_generator.back();
    }
    for (const auto& result : schema.returns()) {
      const c10::AliasInfo* alias = result.alias_info();
      is_view |= alias && !alias->isWrite();
      int same = -1;
      for (size_t i = 0; alias && i < written.size(); ++i) {
        const c10::AliasInfo* other = schema.arguments()[i].alias_info();
        if (written[i] && other && other->beforeSets() == alias->beforeSets()) same = static_cast<int>(i);
      }
      returned_argument.push_back(same);
      const std::string type = result.type()->str();
      returns_tensors &= type == "Tensor" || type == "Tensor[]" || type == "Tensor?";
    }
    is_index = base_name == "index" || base_name == "_unsafe_index";
    is_index_put = base_name.find("index_put") != std::string::npos;
    size_from_scalars = base_name == "arange" || base_name == "range";
    // index.Tensor has the tag for its boolean masks only.
    size_from_data = !is_index && handle.hasTag(at::Tag::dynamic_output_shape);
    draws_without_generator = !has_generator && handle.hasTag(at::Tag::nondeterministic_seeded);
  }

  OperatorHandle op;
  std::string name, base_name;
  std::vector<bool> written, is_out, is_generator;
  std::vector<int> returned_argument;  // per return: the argument that it is, or -1
  bool is_view = false, has_generator = false, returns_tensors = true;
  bool is_index = false, is_index_put = false, size_from_scalars = false, size_from_data = false;
  bool draws_without_generator = false;
};

inline OperatorInfo& info_of(const OperatorHandle& op) {
  static std::mutex mutex;
  static auto* infos = new std::unordered_map<const void*, std::unique_ptr<OperatorInfo>>();
  const void* key = &op.schema();
  std::lock_guard<std::mutex> lock(mutex);
  auto& info = (*infos)[key];
  if (!info) info = std::make_unique<OperatorInfo>(op);
  return *info;
}

// `value` with each of its tensors replaced by `function(tensor)`.
template <class Function>
IValue map_tensors(const IValue& value, Function&& function) {
  const auto apply = [&](const at::Tensor& tensor) { return tensor.defined() ? function(tensor) : tensor; };
  if (value.isTensor()) return apply(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(apply(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(apply(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

template <class Function>
void for_each_tensor(const IValue& value, Function&& function) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    function(tensor);
    return tensor;
  });
}

// The arguments of one call, checked.
class Arguments {
 public:
  Arguments(OperatorInfo& info, c10::ArrayRef<IValue> values) : info_(info), values_(values.vec()) {
    for (size_t i = 0; i < values_.size(); ++i) check(i);
  }

  const std::vector<IValue>& values() const { return values_; }

  // Device indices for the operators that take indices of the host, which CUDA copies with a wait.
  void move_host_indices() {
    if (!info_.is_index && !info_.is_index_put) return;
    for (IValue& value : values_) {
      if (!value.isOptionalTensorList()) continue;
      value = map_tensors(value, [](const at::Tensor& tensor) {
        if (!tensor.is_cpu()) return tensor;
        Counts::get().add("index with host indices");
        return tensor.to(device());
      });
    }
  }

  // Whether an index is a boolean mask: CUDA calls nonzero() for it, unless it can fill instead.
  bool has_mask() const {
    bool mask = false;
    for (const IValue& value : values_) {
      if (!value.isOptionalTensorList()) continue;
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        mask |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      });
    }
    if (info_.is_index_put && mask) {
      const at::Tensor& filled = values_[2].toTensor();
      mask = filled.numel() != 1;
    }
    return mask;
  }

  // For the CPU kernel: views of device memory; scalars of the host as they are now.
  std::vector<IValue> for_cpu() const {
    CpuViews view;
    std::vector<IValue> mapped;
    for (size_t i = 0; i < values_.size(); ++i) {
      if (info_.is_generator[i] || values_[i].isGenerator()) {
        mapped.emplace_back(generator_for_launch(values_[i].toOptional<at::Generator>()));
        continue;
      }
      mapped.push_back(map_tensors(values_[i], [&](const at::Tensor& tensor) {
        if (on_device(tensor)) return view(tensor);
        at::Tensor captured = tensor.clone();
        keep_wrapped_number(captured, tensor);
        return captured;
      }));
      if (mapped.back().isDevice()) mapped.back() = c10::Device(c10::DeviceType::CPU);
    }
    return mapped;
  }

  // New tensors of the same shapes, on the CPU. Numbers of the host stay what they are.
  std::vector<IValue> filled_with(int64_t number) const {
    std::vector<IValue> mapped;
    for (size_t i = 0; i < values_.size(); ++i) {
      const IValue& value = values_[i];
      mapped.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
        if (!on_device(tensor)) return tensor;
        at::Tensor filled = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
        // All of the memory: elements of the tensor may share it.
        const auto count = static_cast<int64_t>(filled.storage().nbytes() / filled.itemsize());
        filled.as_strided({count}, {1}, 0).fill_(number);
        keep_wrapped_number(filled, tensor);
        return filled;
      }));
      if (value.isDevice()) mapped.back() = c10::Device(c10::DeviceType::CPU);
      // The device's generator is drawn from by the launch, not by a rehearsal.
      if (info_.is_generator[i]) mapped.back() = at::Generator(at::make_generator<at::CPUGeneratorImpl>(0));
    }
    return mapped;
  }

  // Equal strings: the operator returns tensors of equal shapes.
  std::string key() const {
    std::string text;
    const auto number = [&](int64_t value) { text.append(reinterpret_cast<const char*>(&value), sizeof value); };
    number(reinterpret_cast<int64_t>(&info_));
    number(static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
    for (size_t i = 0; i < values_.size(); ++i) {
      const IValue& value = values_[i];
      if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
        text += 't';
        if (value.isOptionalTensorList()) {
          for (const auto& tensor : value.toOptionalTensorVector()) text += tensor && tensor->defined() ? 'y' : 'n';
        }
        if (value.isTensor()) text += value.toTensor().defined() ? 'y' : 'n';
        for_each_tensor(value, [&](const at::Tensor& tensor) {
          number(tensor.dim());
          number(static_cast<int64_t>(tensor.scalar_type()));
          number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
          for (int64_t size : tensor.sizes()) number(size);
          for (int64_t stride : tensor.strides()) number(stride);
          if (info_.written[i]) number(tensor.storage_offset());
        });
      } else if (value.isInt() || value.isBool()) {
        text += 'i';
        // Values of Scalar arguments only matter where they are a range: others change at each step.
        const bool matters = info_.size_from_scalars || info_.op.schema().arguments()[i].type()->str() != "Scalar";
        if (matters) number(value.isInt() ? value.toInt() : value.toBool());
      } else if (value.isDouble()) {
        text += 'd';
        if (info_.size_from_scalars) text.append(std::to_string(value.toDouble()));
      } else if (value.isIntList()) {
        text += 'l';
        for (int64_t item : value.toIntVector()) number(item);
        text += ';';
      } else if (value.isBoolList()) {
        text += 'b';
        for (bool item : value.toBoolList()) text += item ? '1' : '0';
      } else if (value.isString()) {
        text += value.toStringRef() + '\0';
      } else {
        text += value.isNone() ? "none" : value.tagKind();
      }
    }
    return text;
  }

 private:
  void check(size_t i) {
    const bool may_be_host_index = (info_.is_index || info_.is_index_put) && values_[i].isOptionalTensorList();
    for_each_tensor(values_[i], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) return;
      // As on CUDA: a number of the host is a kernel's argument. Its value is that of the launch.
      const bool number = tensor.is_cpu() && tensor.dim() == 0 && !info_.written[i];
      TORCH_CHECK(
          number || (tensor.is_cpu() && may_be_host_index),
          "Expected all tensors to be on the same device, but found at least two devices, ", device(), " and ",
          tensor.device(), "! (when calling ", info_.name, ")");
    });
  }

  OperatorInfo& info_;
  std::vector<IValue> values_;
};

// Shapes of what an operator returns, and of its out= arguments after the call.
struct Shape {
  bool defined = false;
  c10::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;

  static Shape of(const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    return {true, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()};
  }
};

struct Shapes {
  struct Return {
    bool is_list = false;
    std::vector<Shape> tensors;
  };
  std::vector<Return> returns;
  std::vector<std::pair<size_t, Shape>> outs;
};

inline void call_kernel(const OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  op.callBoxed(stack);
}

// What operators return, by the shapes of their arguments.
//
// [Note: Rehearsals]
// The first call with some shapes runs the CPU kernel on zeros, in the calling thread: its results have the very dtypes
// and strides of the CPU's, which those of Meta kernels may not be (a layer norm of bf16 values saves a bf16 mean on the
// CPU and an fp32 one elsewhere). Where zeros are refused, as by a division of integers, ones are tried. If these are
// refused, too, the call waits, and the kernel gets the values: a Cholesky decomposition returns, and wrong arguments
// raise in the call, as on any device. Meta kernels would accept some of them.
class ShapeCache {
 public:
  static std::shared_ptr<const Shapes> get(OperatorInfo& info, const Arguments& arguments) {
    static std::mutex mutex;
    static auto* cache = new std::unordered_map<std::string, std::shared_ptr<const Shapes>>();
    const std::string key = arguments.key();
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto found = cache->find(key);
      if (found != cache->end()) return found->second;
    }
    auto shapes = compute(info, arguments);  // without the lock: it takes long
    std::lock_guard<std::mutex> lock(mutex);
    if (cache->size() > 20000) cache->clear();
    (*cache)[key] = shapes;
    return shapes;
  }

 private:
  static std::shared_ptr<const Shapes> compute(OperatorInfo& info, const Arguments& arguments) {
    try {
      return rehearse(info, arguments.filled_with(0));
    } catch (const std::exception&) {
      return rehearse(info, arguments.filled_with(1));
    }
  }

  static std::shared_ptr<const Shapes> rehearse(OperatorInfo& info, const std::vector<IValue>& inputs) {
    Stack stack = inputs;
    call_kernel(info.op, stack);
    auto shapes = std::make_shared<Shapes>();
    for (size_t i = 0; i < stack.size(); ++i) {
      Shapes::Return result;
      result.is_list = stack[i].isTensorList();
      if (info.returned_argument[i] < 0) {
        if (result.is_list) {
          for (const at::Tensor& tensor : stack[i].toTensorVector()) result.tensors.push_back(Shape::of(tensor));
        } else {
          result.tensors.push_back(stack[i].isTensor() ? Shape::of(stack[i].toTensor()) : Shape());
        }
      }
      shapes->returns.push_back(std::move(result));
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (info.is_out[i] && inputs[i].isTensor()) shapes->outs.emplace_back(i, Shape::of(inputs[i].toTensor()));
    }
    return shapes;
  }
};

// Tensors that the call made, in the order of the schema, without those that are arguments.
inline std::vector<at::Tensor> made_by(const OperatorInfo& info, const Stack& results) {
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < results.size(); ++i) {
    if (info.returned_argument[i] >= 0) continue;
    if (results[i].isTensorList()) {
      for (const at::Tensor& tensor : results[i].toTensorVector()) made.push_back(tensor);
    } else {
      made.push_back(results[i].isTensor() ? results[i].toTensor() : at::Tensor());
    }
  }
  return made;
}

inline void write_result(const OperatorInfo& info, const at::Tensor& to, const at::Tensor& from) {
  if (!to.defined() && !from.defined()) return;
  TORCH_CHECK(
      to.defined() && from.defined() && to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(),
      "other shapes or dtypes than in the rehearsal");
  if (from.numel() == 0) return;
  if (same_layout(to, from)) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    // The next kernel sees other strides than it would on the CPU. Noted: it may then compute other bits.
    Counts::get().add("LAYOUT " + info.name);
    to.copy_(from);
  }
}

// Metadata only: at once, whatever is queued.
inline void call_view(OperatorInfo& info, const Arguments& arguments, Stack& results) {
  at::Tensor base;
  for (const IValue& value : arguments.values()) {
    if (!base.defined() && value.isTensor()) base = value.toTensor();
  }
  results = arguments.for_cpu();
  call_kernel(info.op, results);
  for (IValue& result : results) {
    result = map_tensors(result, [&](const at::Tensor& view) {
      // In inference mode, too, the view of a tensor that is not of that mode has the keys of its base.
      auto made = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
      return made;
    });
  }
}

// Wait for the stream and run the CPU kernel here.
inline void call_synchronously(OperatorInfo& info, const Arguments& arguments, const std::string& why, Stack& results) {
  Queues::get().synchronize_stream(current_stream());
  std::vector<IValue> inputs = arguments.for_cpu();
  for (size_t i = 0; i < inputs.size(); ++i) {
    // A view cannot be resized.
    if (info.is_out[i] && inputs[i].isTensor()) {
      const at::Tensor& out = inputs[i].toTensor();
      inputs[i] = at::empty({0}, out.options());
    }
  }
  results = inputs;
  call_kernel(info.op, results);
  Counts::get().add(why);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!info.is_out[i] || !inputs[i].isTensor()) continue;
    const at::Tensor& from = inputs[i].toTensor();
    const at::Tensor& to = arguments.values()[i].toTensor();
    if (to.sizes() != from.sizes()) resize_tensor(to, from.sizes(), from.strides());
    Queues::get().synchronize_stream(current_stream());  // for the resize
    cpu_view(to).copy_(from);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (info.returned_argument[i] >= 0) {
      results[i] = arguments.values()[static_cast<size_t>(info.returned_argument[i])];
      continue;
    }
    results[i] = map_tensors(results[i], [&](const at::Tensor& from) {
      at::Tensor to = new_tensor(from.scalar_type(), from.sizes(), from.strides());
      write_result(info, cpu_view(to), from);  // new memory: no queued item uses it
      return to;
    });
  }
}

inline void call_queued(OperatorInfo& info, const Arguments& arguments, const Shapes& shapes, Stack& results) {
  for (const auto& [i, shape] : shapes.outs) {
    const at::Tensor& out = arguments.values()[i].toTensor();
    if (out.sizes() != shape.sizes) resize_tensor(out, shape.sizes, shape.strides);
  }
  results.clear();
  std::vector<at::Tensor> outputs;  // CPU views of what is returned
  for (size_t i = 0; i < info.returned_argument.size(); ++i) {
    if (info.returned_argument[i] >= 0) {
      results.push_back(arguments.values()[static_cast<size_t>(info.returned_argument[i])]);
      continue;
    }
    c10::List<at::Tensor> made;
    for (const Shape& shape : shapes.returns[i].tensors) {
      at::Tensor tensor = shape.defined ? new_tensor(shape.dtype, shape.sizes, shape.strides) : at::Tensor();
      outputs.push_back(tensor.defined() ? cpu_view(tensor) : tensor);
      made.push_back(tensor);
    }
    if (shapes.returns[i].is_list) {
      results.emplace_back(made);
    } else {
      results.emplace_back(made.get(0));
    }
  }
  // After the allocations: they may queue the poisoning of memory that this call is given.
  launch(info.name, [&info, inputs = arguments.for_cpu(), outputs = std::move(outputs)]() mutable {
    Stack stack = std::move(inputs);
    call_kernel(info.op, stack);
    const std::vector<at::Tensor> made = made_by(info, stack);
    for (size_t i = 0; i < made.size(); ++i) write_result(info, outputs[i], made[i]);
  });
}

inline void call_operator(OperatorInfo& info, c10::ArrayRef<IValue> values, Stack& results) {
  Queues::get().check_alive();
  Arguments arguments(info, values);
  if (info.is_view) return call_view(info, arguments, results);
  arguments.move_host_indices();
  if (!info.returns_tensors || info.size_from_data || info.draws_without_generator) {
    return call_synchronously(
        info, arguments, info.base_name == "_local_scalar_dense" ? "item" : info.base_name, results);
  }
  if ((info.is_index || info.is_index_put) && arguments.has_mask()) {
    return call_synchronously(info, arguments, "nonzero", results);
  }
  std::shared_ptr<const Shapes> shapes;
  try {
    shapes = ShapeCache::get(info, arguments);
  } catch (const std::exception&) {
    // Here the CPU kernel gets the values, too: it succeeds, or raises the right error.
    return call_synchronously(info, arguments, "SLOW " + info.name, results);
  }
  call_queued(info, arguments, *shapes, results);
}

inline void fallback(const OperatorHandle& op, Stack* stack) {
  OperatorInfo& info = info_of(op);
  const size_t count = info.written.size();
  Stack results;
  call_operator(info, torch::jit::last(*stack, count), results);
  torch::jit::drop(*stack, count);
  for (IValue& result : results) stack->push_back(std::move(result));
}

}  // namespace sim
