// Worker threads that run host jobs without Python: no thread here takes the GIL.
//
// The device may wait for a job while a Python thread blocks in a call of the device with the GIL held. So a job needs
// nothing of Python once it is submitted: words in host memory tell when its inputs have arrived, and a word tells a
// waiting stream that it is done.
//
// [Note: owners] Python allocates jobs and all that they point to, and keeps them until `settled` is 1. No thread here
// touches a job after that store.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <iterator>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include "file_transfers.h"
#include "state_forms.h"

namespace zenflow {

// ---- what Python fills: see native/library.py

enum State : uint32_t { kPending = 0, kDone = 1, kFailed = 2 };
enum GateKind : int32_t { kCounter = 0, kState = 1 };
enum Kind : int32_t { kUpdate = 0, kExchange = 1, kRead = 2, kWrite = 3 };

// An input of a job: a counter that must reach `value` (modulo 2^32), or the state of other work.
struct Gate {
  const uint32_t* word;
  uint32_t value;
  int32_t kind;
};

// When and where a task ran.
struct Record {
  int64_t begin_ns;  // CLOCK_MONOTONIC, as time.perf_counter_ns
  int64_t end_ns;
  int64_t rows;      // that an exchange has swapped
  int32_t worker;
};

// A factor on a gradient that the device computed: read when the gates are reached.
struct LateScale {
  const double* const* cells;
  int64_t count;
  int64_t gradient;
  double factor;  // of the only cell; 0: the largest finite magnitude of all cells, 1 if none is above 0
};

struct Exchange {
  const int32_t* rows;  // of the state; -1 behind the last one
  StoredState state;
  float* block[1 + kMostArrays];  // master and arrays
  void* weights;        // in the order of the state's rows; null: none are written
  int32_t weights_dtype;
};

struct Job {
  uint32_t state;    // kDone, or kFailed as soon as one task cannot run
  uint32_t settled;  // 1: no task runs or will run
  uint32_t queued;   // 1: was submitted
  int32_t kind;
  int64_t failed_gate;  // whose work has failed; -1: none
  int64_t error;        // of a transfer: an error number, or kOtherChecksum; 0: none
  int64_t step;
  int64_t deadline;
  const Gate* gates;
  int64_t gate_count;
  uint32_t* flag;  // raised to flag_value when the job is done or has failed; may be null
  uint32_t flag_value;
  const int64_t* bounds;  // task i covers bounds[i] to bounds[i + 1]
  int64_t tasks;
  Record* records;  // one per task
  UpdateWindow* window;
  Step* steps;  // of the window
  const LateScale* late;
  int64_t late_count;
  const Exchange* exchange;
  Transfer* transfer;
  // The pool's, under its lock.
  int64_t untaken;
  int64_t unfinished;
};

// ---- the work

inline double largest(const LateScale& scale) {
  double most = 0.0;
  for (int64_t i = 0; i < scale.count; ++i) {
    const double magnitude = __builtin_fabs(*scale.cells[i]);
    if (magnitude < __builtin_inf() && magnitude > most) most = magnitude;
  }
  return most > 0.0 ? most : 1.0;
}

// Call it when the gates are reached, before any task runs.
inline void read_late_scales(const Job& job) {
  for (int64_t i = 0; i < job.late_count; ++i) {
    const LateScale& scale = job.late[i];
    job.steps[scale.gradient].grad_scale = (float)(scale.factor ? scale.factor * *scale.cells[0] : largest(scale));
  }
}

// Casts masters to the weights of the elements from `first` on. No other task of the job writes them.
inline void write_weights(const Exchange& exchange, const float* master, int64_t first, int64_t count) {
  switch (exchange.weights_dtype) {
    case kFloat32: return cast<Float32>(master, (float*)exchange.weights + first, count);
    case kBFloat16: return cast<BFloat16>(master, (uint16_t*)exchange.weights + first, count);
    case kFloat16: return cast<Float16>(master, (uint16_t*)exchange.weights + first, count);
  }
}

inline void swap_elements(float* __restrict one, float* __restrict other, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::swap(one[i], other[i]);
}

// `block`: the row's place in that of the master, and in those of the arrays.
inline void swap_plain_row(const Exchange& exchange, int64_t row, float* const* block) {
  const StoredState& state = exchange.state;
  const int64_t length = state.length, first = row * length;
  swap_elements((float*)state.master + first, block[0], length);
  for (int array = 0; array < state.count; ++array) {
    swap_elements((float*)state.arrays[array] + first, block[1 + array], length);
  }
  if (exchange.weights) write_weights(exchange, (float*)exchange.state.master + first, first, length);
}

inline void swap_row(const Exchange& exchange, int64_t row, float* const* block) {
  const StoredState& state = exchange.state;
  const int64_t first = row * state.length, end = first + state.length;
  Tile tile;
  for (int64_t at = first, stop; at < end; at = stop) {
    stop = tile_end(state, at, end);
    const int count = (int)(stop - at);
    tile.load(state, at, count);
    swap_elements(tile.master, block[0] + (at - first), count);
    for (int array = 0; array < state.count; ++array) {
      swap_elements(tile.arrays[array], block[1 + array] + (at - first), count);
    }
    if (exchange.weights) write_weights(exchange, tile.master, at, count);
    tile.store(state, at, count, 0);
  }
}

// Returns the number of rows.
inline int64_t swap_rows(const Exchange& exchange, int64_t begin, int64_t end) {
  const int64_t length = exchange.state.length;
  const bool plain = is_plain(exchange.state);
  int64_t at = begin;
  for (; at < end && exchange.rows[at] >= 0; ++at) {
    float* block[1 + kMostArrays];
    for (int part = 0; part <= exchange.state.count; ++part) block[part] = exchange.block[part] + at * length;
    (plain ? swap_plain_row : swap_row)(exchange, exchange.rows[at], block);
  }
  return at - begin;
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// ---- ends of jobs

template <class Word>
inline Word seen(const Word* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

// The job is done if it was pending. It is settled, and Python may free it, if no task is left.
inline void end_job(Job* job, uint32_t state) {
  const bool settled = job->unfinished == 0;
  if (job->state == kPending) {
    // Before the state, which lets the parameter's next job run: that one raises the same counter to the next value,
    // and a late write of this value would take it back, under a stream that waits for the next one.
    if (job->flag && (int32_t)(job->flag_value - seen(job->flag)) > 0) {  // an aborted later job may have raised it
      __atomic_thread_fence(__ATOMIC_SEQ_CST);
      __atomic_store_n(job->flag, job->flag_value, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&job->state, state, __ATOMIC_RELEASE);
  }
  if (settled) __atomic_store_n(&job->settled, 1u, __ATOMIC_RELEASE);
}

// Fails a job: tasks that no worker has taken will not run.
inline void fail_job(Job* job) {
  job->unfinished -= job->untaken;
  job->untaken = 0;
  end_job(job, kFailed);
}

// ---- the threads

// A worker takes a task of the first job whose gates are reached, by step and then by deadline. A job of a later step
// must not delay an earlier one: its gradients may come from a device that waits for the earlier job.
class Pool {
 public:
  // Threads start here: as many as the system allows. Throws std::system_error if it allows none.
  // Their names begin with `name`.
  Pool(int workers, const int32_t* cores, int64_t poll_ns, const char* name)
      : poll_(poll_ns), process_(getpid()), workers_(workers), name_(name) {
    // A signal must reach a thread of Python, whose system calls it interrupts. Threads inherit the mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      threads_.reserve(workers);
      for (int index = 0; index < workers; ++index) {
        const int core = cores ? cores[index] : -1;
        threads_.emplace_back([this, index, core] { run(index, core); });
        ++running_;
      }
    } catch (const std::system_error& refused) {
      error = refused.code().value();
    } catch (const std::bad_alloc&) {
      error = ENOMEM;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (threads_.empty()) throw std::system_error(error, std::generic_category());
  }

  // A forked child has the memory of its parent's pool and none of the threads. Its locks may be held forever.
  bool in_child() const { return getpid() != process_; }

  // Queues all jobs, or none. Returns 0 or an error number.
  int submit(Job* const* jobs, int64_t count) {
    if (in_child()) return EOWNERDEAD;
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closing_) return ESHUTDOWN;
      std::vector<Queued> queue;
      queue.reserve(queue_.size() + count);
      std::vector<Queued> added;
      for (int64_t i = 0; i < count; ++i) added.push_back(Queued{jobs[i], shares(*jobs[i])});
      std::stable_sort(added.begin(), added.end(), earlier);
      // Nothing below allocates: an error leaves no job queued, and no queued one lost.
      std::merge(
          std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()),
          std::make_move_iterator(added.begin()), std::make_move_iterator(added.end()), std::back_inserter(queue), earlier);
      queue_.swap(queue);
      for (int64_t i = 0; i < count; ++i) jobs[i]->queued = 1;
      work_.notify_one();  // it wakes the next one: see run
    } catch (const std::bad_alloc&) {
      return ENOMEM;
    }
    return 0;
  }

  // Fails a job, queued or not. Tasks that run go on.
  void abort(Job* job) {
    if (in_child()) {  // its only thread is here, and the tasks that run are the parent's
      job->unfinished = job->untaken;
      return fail_job(job);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (seen(&job->settled)) return;
    for (auto each = queue_.begin(); each != queue_.end(); ++each) {
      if (each->job == job) {
        queue_.erase(each);
        break;
      }
    }
    fail_job(job);
    done_.notify_all();
  }

  // Blocks until the job is done, or settled; at most so long. In a forked child it does not wait.
  void wait(const Job* job, bool settled, int64_t timeout_ns) {
    const auto reached = [&] { return seen(settled ? &job->settled : &job->state) != 0; };
    if (in_child()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), reached);
  }

  // Fails all queued jobs, waits for the tasks that run, and ends the threads.
  void end() {
    if (in_child()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (Queued& queued : queue_) fail_job(queued.job);
      queue_.clear();
      done_.notify_all();
    }
    close(INT64_MAX);
  }

  // Ends the threads when the queue is empty. Returns whether they have ended within the time; may be repeated.
  bool close(int64_t timeout_ns) {
    if (in_child()) return true;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      closing_ = true;
      work_.notify_all();
      const auto ended = [&] { return running_ == 0; };
      if (timeout_ns == INT64_MAX) {
        done_.wait(lock, ended);
      } else if (!done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ended)) {
        return false;
      }
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return true;
  }

 private:
  struct Range {
    int64_t begin, end;
  };

  // A job with tasks that no worker has taken, and those that each worker should take.
  struct Queued {
    Job* job;
    std::vector<Range> by_worker;
  };

  static bool earlier(const Queued& one, const Queued& other) {
    const Job &a = *one.job, &b = *other.job;
    return a.step != b.step ? a.step < b.step : a.deadline < b.deadline;
  }

  // As HostState.touch in runtime/parameters/host_state.py: adjacent tasks for one worker.
  std::vector<Range> shares(const Job& job) const {
    std::vector<Range> shares(workers_);
    for (int64_t worker = 0; worker < workers_; ++worker) {
      shares[worker].begin = (worker * job.tasks + workers_ - 1) / workers_;
      shares[worker].end = ((worker + 1) * job.tasks + workers_ - 1) / workers_;
    }
    return shares;
  }

  // The worker's own next task, or the last one of the worker with the most tasks left.
  static int64_t take(Queued& queued, int worker) {
    --queued.job->untaken;
    Range& own = queued.by_worker[worker];
    if (own.begin < own.end) return own.begin++;
    Range* most = &own;
    for (Range& range : queued.by_worker) {
      if (range.end - range.begin > most->end - most->begin) most = &range;
    }
    return --most->end;
  }

  enum class Inputs { kMissing, kReached, kFailed };

  static Inputs inputs_of(Job* job) {
    for (int64_t i = 0; i < job->gate_count; ++i) {
      const Gate& gate = job->gates[i];
      const uint32_t word = seen(gate.word);
      if (gate.kind == kCounter) {
        if ((int32_t)(word - gate.value) < 0) return Inputs::kMissing;
      } else if (word == kFailed) {
        job->failed_gate = i;
        return Inputs::kFailed;
      } else if (word != kDone) {
        return Inputs::kMissing;
      }
    }
    return Inputs::kReached;
  }

  // Position of the first job whose inputs have arrived, or the queue's length. Jobs with a failed input fail.
  size_t first_arrived() {
    size_t at = 0;
    while (at < queue_.size()) {
      Job* const job = queue_[at].job;
      const bool started = job->untaken < job->tasks;
      const Inputs inputs = started ? Inputs::kReached : inputs_of(job);
      if (inputs == Inputs::kReached) return at;
      if (inputs == Inputs::kMissing) {
        ++at;
        continue;
      }
      queue_.erase(queue_.begin() + at);
      fail_job(job);
      done_.notify_all();
      at = 0;  // its end may be what an earlier one in the queue waited for
    }
    return at;
  }

  void run(int index, int core) {
    char name[16];
    std::snprintf(name, sizeof name, "%s-%d", name_.c_str(), index);
    pthread_setname_np(pthread_self(), name);
    if (core >= 0) {
      cpu_set_t cores;
      CPU_ZERO(&cores);
      CPU_SET(core, &cores);
      pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);  // may be refused: slower, and as right
    }
    // A thread inherits the modes of the one that starts it: torch.set_flush_denormal would change results.
    std::fesetenv(FE_DFL_ENV);

    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const size_t at = first_arrived();
      if (at == queue_.size()) {
        if (queue_.empty() && closing_) break;
        if (queue_.empty() || polling_) {
          work_.wait(lock);
        } else {
          polling_ = true;  // a copy that arrives wakes no thread: one idle worker looks
          work_.wait_for(lock, poll_);
          polling_ = false;
        }
        continue;
      }
      Job* const job = queue_[at].job;
      const bool first = job->untaken == job->tasks;
      const int64_t task = take(queue_[at], index);
      if (job->untaken == 0) queue_.erase(queue_.begin() + at);
      if (first) read_late_scales(*job);
      if (!queue_.empty()) work_.notify_one();  // to take the next task, or to look for inputs in place of this one
      lock.unlock();
      const int64_t error = run_task(job, task, index);
      lock.lock();
      --job->unfinished;
      if (error != 0) job->error = error;
      if (job->unfinished == 0) {
        end_job(job, job->error != 0 ? kFailed : kDone);
        done_.notify_all();
      }
    }
    --running_;
    work_.notify_all();  // the others sleep while the queue has jobs, and it is empty now
    done_.notify_all();
  }

  // Returns the error of a transfer; 0: none.
  static int64_t run_task(Job* job, int64_t task, int worker) {
    const int64_t begin = job->bounds[task], end = job->bounds[task + 1];
    int64_t error = 0;
    Record record{now_ns(), 0, 0, worker};
    switch (job->kind) {
      case kUpdate: job->window->update(job->window, begin, end); break;
      case kExchange: record.rows = swap_rows(*job->exchange, begin, end); break;
      case kRead: error = read_chunk(*job->transfer); break;
      case kWrite: error = write_chunk(*job->transfer); break;
    }
    record.end_ns = now_ns();
    job->records[task] = record;
    return error;
  }

  const std::chrono::nanoseconds poll_;
  const pid_t process_;
  const int64_t workers_;
  const std::string name_;
  std::mutex mutex_;
  std::condition_variable work_;  // the queue has changed
  std::condition_variable done_;  // a job is done, or a thread has ended
  std::vector<Queued> queue_;     // by step, deadline and order of submission
  std::vector<std::thread> threads_;
  int running_ = 0;
  bool polling_ = false;
  bool closing_ = false;
};

}  // namespace zenflow
