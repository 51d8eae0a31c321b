// Random jobs on a pool, for the sanitizers: gates that open late, inputs that fail, aborts, chains, several waiters.
// Ends with 0 if every job ended as it must, and every exchange was made once or, if its job failed, whole tasks of it.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "host_jobs.cpp"

using namespace zenflow;

constexpr int kJobs = 60, kRows = 24, kLength = 5, kTasks = 4;

struct Work {
  Job job{};
  std::vector<Gate> gates;
  std::vector<int64_t> bounds;
  std::vector<Record> records{kTasks};
  std::vector<int32_t> rows;
  std::vector<float> state[3], block[3];
  std::vector<uint16_t> weights;  // bf16; half of the exchanges write them
  Exchange exchange{};
  uint32_t counter = 0, input = kPending, flag = 0;
  bool input_fails = false, aborted = false;
  Work* before = nullptr;

  Work(int number, std::mt19937& random, Work* chained) : before(chained) {
    for (int task = 0; task <= kTasks; ++task) bounds.push_back(task * kRows / kTasks);
    for (int row = 0; row < kRows; ++row) rows.push_back(row);
    for (int part = 0; part < 3; ++part) {
      state[part].assign(kRows * kLength, 1.0f);
      block[part].assign(kRows * kLength, 2.0f);
      exchange.block[part] = block[part].data();
    }
    exchange.rows = rows.data();
    exchange.state.master = state[0].data();
    for (int array = 0; array < 2; ++array) exchange.state.arrays[array] = state[1 + array].data();
    exchange.state.count = exchange.state.rounded = 2;
    exchange.state.length = kLength;
    weights.assign(kRows * kLength, 0);
    if (number % 2) exchange.weights = weights.data();
    exchange.weights_dtype = kBFloat16;
    gates.push_back({&counter, 1, kCounter});
    gates.push_back({&input, kDone, kState});
    if (before) gates.push_back({&before->job.state, kDone, kState});
    input_fails = random() % 10 == 0;
    job.kind = kExchange;
    job.failed_gate = -1;
    job.step = number / 20;
    job.deadline = random() % 5;
    job.gates = gates.data();
    job.gate_count = gates.size();
    job.flag = &flag;
    job.flag_value = 1;
    job.bounds = bounds.data();
    job.tasks = job.untaken = job.unfinished = kTasks;
    job.records = records.data();
    job.exchange = &exchange;
  }

  bool right() const {
    const bool must_fail = input_fails || (before && before->job.state == kFailed);
    if (!job.settled || !flag) return false;
    if (must_fail != (job.state == kFailed) && !aborted) return false;
    for (int task = 0; task < kTasks; ++task) {
      const float first = state[0][bounds[task] * kLength];
      const uint16_t weight = exchange.weights && first == 2.0f ? 0x4000 : 0;  // 2 in bf16
      for (int64_t at = bounds[task] * kLength; at < bounds[task + 1] * kLength; ++at) {
        if (weights[at] != weight) return false;
      }
      for (int part = 0; part < 3; ++part) {
        for (int64_t at = bounds[task] * kLength; at < bounds[task + 1] * kLength; ++at) {
          if (state[part][at] != first || block[part][at] != 3.0f - first) return false;
        }
      }
      if (job.state == kDone && first != 2.0f) return false;
    }
    return true;
  }
};

int main() {
  for (int round = 0; round < 30; ++round) {
    std::mt19937 random(round);
    std::vector<std::unique_ptr<Work>> works;
    for (int number = 0; number < kJobs; ++number) {
      Work* chained = number && random() % 3 == 0 ? works[random() % number].get() : nullptr;
      works.push_back(std::make_unique<Work>(number, random, chained));
    }
    Pool* pool = nullptr;
    if (zenflow_open(&pool, 1 + round % 5, nullptr, 20000, "stress")) return 2;

    std::thread opener([&] {
      std::mt19937 own(round + 1000);
      for (auto& work : works) {
        if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
        __atomic_store_n(&work->counter, 1u, __ATOMIC_RELEASE);
        __atomic_store_n(&work->input, work->input_fails ? kFailed : kDone, __ATOMIC_RELEASE);
      }
    });
    std::vector<std::thread> waiters;
    std::atomic<int> at{0};
    for (int i = 0; i < 3; ++i) {
      waiters.emplace_back([&, i] {
        while (at.load() < kJobs) std::this_thread::yield();
        for (auto& work : works) {
          while (!zenflow_wait(pool, &work->job, i == 0, 1000000)) {
          }
        }
      });
    }
    for (int number = 0; number < kJobs;) {
      Job* jobs[7];
      int count = 0;
      while (count < 7 && number < kJobs) jobs[count++] = &works[number++]->job;
      if (zenflow_submit(pool, jobs, count)) return 3;
      if (random() % 3 == 0) {
        const int chosen = random() % number;
        works[chosen]->aborted = true;
        zenflow_abort(pool, &works[chosen]->job);
      }
    }
    at = kJobs;
    opener.join();
    for (std::thread& waiter : waiters) waiter.join();
    while (!zenflow_close(pool, 1000000)) {
    }
    delete pool;
    for (auto& work : works) {
      if (!work->right()) {
        std::printf("round %d: job %d is wrong\n", round, (int)(&work - &works[0]));
        return 1;
      }
    }
  }
  return 0;
}
