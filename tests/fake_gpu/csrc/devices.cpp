// How many devices there are, what they can do, and which context a thread has.

#include <map>

#include "device.h"

namespace fake {

int devices() {
  static const int number = static_cast<int>(setting("FAKE_GPU_DEVICES", 1));
  return number;
}

std::vector<void*>& contexts() {
  thread_local std::vector<void*> stack;
  return stack;
}

void* context() { return contexts().empty() ? nullptr : contexts().back(); }

void set_context(void* given) {
  if (!contexts().empty()) contexts().pop_back();
  if (given != nullptr) contexts().push_back(given);
}

void* primary_context() {
  static char it[16];
  return it;
}

// Attributes of an H100, by CUdevice_attribute. Others are 0.
int attribute(int number) {
  static const std::map<int, int> values = {
      {1, 1024},     {2, 1024},     {3, 1024},    {4, 64},       {5, 2147483647}, {6, 65535},   {7, 65535},
      {8, 49152},    {9, 65536},    {10, 32},     {12, 65536},   {13, 1980000},   {16, 132},    {33, 1},
      {36, 2619000}, {37, 5120},    {38, 52428800}, {39, 2048},  {40, 3},         {41, 1},      {75, 9},
      {76, 0},       {81, 233472},  {82, 65536},  {83, 1},       {91, 1},         {95, 1},      {97, 232448},
      {99, 1},       {106, 32},     {115, 1},     {120, 1}};
  constexpr int kStreamMemoryOperations = 122;
  if (number == kStreamMemoryOperations) return static_cast<int>(setting("FAKE_GPU_STREAM_VALUES", 1));
  const auto found = values.find(number);
  return found == values.end() ? 0 : found->second;
}

}  // namespace fake
