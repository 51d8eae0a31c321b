// Tensors over the same memory for other devices, and changes of a storage's size.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include "device.h"

namespace sim {

inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == c10::DeviceType::PrivateUse1; }

inline at::Tensor make_tensor(
    c10::Storage storage, c10::DispatchKey key, caffe2::TypeMeta dtype, c10::IntArrayRef sizes,
    c10::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

// A number of Python that became a tensor takes part in type promotion differently.
inline void keep_wrapped_number(const at::Tensor& to, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

inline at::Tensor new_tensor(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::detail::empty_strided_generic(
      sizes, strides, &DeviceAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// CPU tensors over the memory of device tensors. They own nothing: like a kernel's pointers, they keep nothing alive.
class CpuViews {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    for (auto& [known, view] : storages_) {
      if (known == storage) return view_of(tensor, view);
    }
    // One storage per storage: kernels compare them to find overlapping arguments.
    storages_.emplace_back(
        storage, c10::Storage(
                     c10::Storage::use_byte_size_t(), storage->nbytes(),
                     c10::DataPtr(storage->mutable_data(), c10::Device(c10::DeviceType::CPU))));
    return view_of(tensor, storages_.back().second);
  }

 private:
  static at::Tensor view_of(const at::Tensor& tensor, const c10::Storage& storage) {
    // A view of inference mode could not be written by the executor, whose thread is not in that mode.
    c10::InferenceMode no_inference(false);
    auto view = make_tensor(
        storage, c10::DispatchKey::CPU, tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
    keep_wrapped_number(view, tensor);
    return view;
  }

  c10::SmallVector<std::pair<c10::StorageImpl*, c10::Storage>, 8> storages_;
};

inline at::Tensor cpu_view(const at::Tensor& tensor) { return CpuViews()(tensor); }

inline uint64_t launch(std::string name, std::function<void()> run) {
  Item item;
  item.name = std::move(name);
  item.run = [run = std::move(run)] {
    try {
      run();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  };
  return Queues::get().launch(current_stream(), std::move(item));
}

inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  if (bytes == storage->nbytes()) return;
  c10::DataPtr data = DeviceAllocator::get().allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept) {
    void* to = data.get();
    const void* from = storage->data();
    launch("storage resize", [to, from, kept] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(data));  // frees the old memory, in the order of its stream
  storage->set_nbytes(bytes);
}

inline void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->sizes() == sizes && impl->strides() == strides) return;
  const size_t needed =
      at::detail::computeStorageNbytes(sizes, strides, impl->dtype().itemsize(), impl->storage_offset());
  impl->set_sizes_and_strides(sizes, strides);
  if (impl->numel() && needed > impl->storage().nbytes()) {
    resize_storage(impl->storage().unsafeGetStorageImpl(), needed);
  }
}

inline std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

}  // namespace sim
