// The streams of the simulated device, and the thread that runs them. Knows nothing of PyTorch.
//
// Host threads append items to streams. One executor thread takes the items at the heads of the streams in a seeded
// random order: any order that the device could legally take. No function here touches Python or its GIL.

#pragma once

#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sim {

struct DeviceError : std::runtime_error {
  explicit DeviceError(const std::string& reason) : std::runtime_error("simulated device error: " + reason) {}
};

inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A moment of a stream: what one recording of an event stands for.
struct Mark {
  int64_t stream = 0;
  uint64_t position = 0;
  std::atomic<bool> passed{false};
  double time_ms = 0;  // valid if passed
};

using MarkPtr = std::shared_ptr<Mark>;

struct Item {
  std::string name;
  std::function<void()> run;             // may be empty
  MarkPtr after;                         // runs after this mark has passed, if set
  const uint32_t* wait_address = nullptr;  // runs after the number there has reached wait_value, if set
  uint32_t wait_value = 0;
  MarkPtr mark;         // passes when the item has run, if set
  bool counted = true;  // takes one of the queue's entries
  uint64_t id = 0;      // in the order of all launches

  bool ready() const {
    if (after && !after->passed.load(std::memory_order_acquire)) return false;
    if (wait_address) {
      // The comparison of the driver's GEQ: modulo 2**32.
      const uint32_t found = __atomic_load_n(wait_address, __ATOMIC_ACQUIRE);
      return static_cast<int32_t>(found - wait_value) >= 0;
    }
    return true;
  }
};

struct StreamQueue {
  int64_t id = 0;
  int64_t order = 0;  // how many streams were made before it since the last configure(), plus one
  double late = 0;    // probability to be passed over; 1: runs last, see run_last
  std::deque<Item> items;
  uint64_t launched = 0;           // items appended so far
  std::atomic<uint64_t> done{0};   // items that have run so far
};

struct Options {
  uint64_t seed = 0;
  size_t limit = 0;  // entries that fit into the launch queue; 0: unbounded
  bool in_order = false;
  double default_late = 0;
  double other_late = 0;
  std::map<int64_t, double> late_by_order;
};

class Queues {
 public:
  // Never destroyed: threads may still call it while the process ends.
  static Queues& get() {
    static Queues* queues = new Queues();
    return *queues;
  }

  int64_t make_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    return add_stream();
  }

  bool has_stream(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return id >= 0 && static_cast<size_t>(id) < streams_.size();
  }

  // Append an item; its position in the stream is returned. Blocks while the launch queue is full.
  uint64_t launch(int64_t stream_id, Item item) {
    std::unique_lock<std::mutex> lock(mutex_);
    StreamQueue& stream = at(stream_id);
    raise_if_dead();
    if (item.counted && options_.limit) {
      // Hazard that is simulated on purpose: a caller that holds the GIL keeps it while it blocks here.
      wait(lock, [&] { return counted_ < options_.limit; });
    }
    item.id = ++last_id_;
    counted_ += item.counted;
    const uint64_t position = ++stream.launched;
    if (item.mark) {
      item.mark->stream = stream_id;
      item.mark->position = position;
    }
    stream.items.push_back(std::move(item));
    idle_ = false;
    executor_wakes_.notify_one();
    if (options_.in_order) {
      // An item that waits for the host cannot be waited for: the host may be what it waits for.
      wait(lock, [&] { return stream.done.load() >= position || idle_; });
    }
    return position;
  }

  void synchronize_stream(int64_t stream_id) {
    std::unique_lock<std::mutex> lock(mutex_);
    StreamQueue& stream = at(stream_id);
    const uint64_t position = stream.launched;
    wait(lock, [&] { return stream.done.load() >= position; });
  }

  void synchronize_position(int64_t stream_id, uint64_t position) {
    std::unique_lock<std::mutex> lock(mutex_);
    StreamQueue& stream = at(stream_id);
    wait(lock, [&] { return stream.done.load() >= position; });
  }

  void synchronize_mark(const MarkPtr& mark) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait(lock, [&] { return mark->passed.load(); });
  }

  void synchronize_device() {
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<std::pair<StreamQueue*, uint64_t>> ends;
    for (auto& stream : streams_) ends.emplace_back(stream.get(), stream->launched);
    wait(lock, [&] {
      return std::all_of(ends.begin(), ends.end(), [](auto& end) { return end.first->done.load() >= end.second; });
    });
  }

  bool query_stream(int64_t stream_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    raise_if_dead();
    StreamQueue& stream = at(stream_id);
    return stream.done.load() >= stream.launched;
  }

  void check_alive() {
    std::lock_guard<std::mutex> lock(mutex_);
    raise_if_dead();
  }

  uint64_t launched(int64_t stream_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return at(stream_id).launched;
  }

  bool has_run(int64_t stream_id, uint64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    return at(stream_id).done.load() >= position;
  }

  uint64_t last_id() {
    std::lock_guard<std::mutex> lock(mutex_);
    return last_id_;
  }

  // Return memory to the system after all items launched so far have run: a misplaced reader finds poison, not a fault.
  void free_after(uint64_t id, void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    to_free_.emplace_back(id, pointer);
  }

  void die(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    set_dead(reason);
  }

  void die_after(uint64_t items) {
    std::lock_guard<std::mutex> lock(mutex_);
    dies_after_ = items + 1;
  }

  // Drop what is queued, revive the device, and apply new options. No other thread may use the device meanwhile.
  void configure(Options options) {
    std::unique_lock<std::mutex> lock(mutex_);
    dead_ = true;
    reason_ = "the simulator is being configured";
    wake_all();
    host_wakes_.wait(lock, [&] { return !running_ && waiting_ == 0; });
    drop_all();
    options_ = std::move(options);
    random_.seed(options_.seed);
    dies_after_ = 0;
    when_full_ = nullptr;
    streams_since_configure_ = 0;
    for (auto& stream : streams_) {
      stream->order = 0;
      stream->late = stream->id == 0 ? options_.default_late : options_.other_late;
    }
    dead_ = last_may_run_ = false;
    reason_.clear();
    executor_wakes_.notify_one();
  }

  void set_late(int64_t stream_id, double late) {
    std::lock_guard<std::mutex> lock(mutex_);
    at(stream_id).late = late;
  }

  // Ends the executor. Later calls raise: a process that ends does not wait for its device.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) return;
      stopped_ = true;
      dead_ = true;
      reason_ = "the simulator has stopped";
      wake_all();
    }
    executor_.join();
  }

  // Write 1 to a number of the host as soon as a launch blocks on the full queue, and no stream can run.
  void write_when_full(uint32_t* word) {
    std::lock_guard<std::mutex> lock(mutex_);
    when_full_ = word;
  }

  // A host thread begins (1) or ends (-1) a wait for something else that may need the device.
  void count_waiting(int change) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_ += change;
    executor_wakes_.notify_one();
  }

  // Block until no stream can run but those that run last.
  void run_others() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_ = false;
    wait(lock, [&] { return idle_; }, false);
  }

  // Run one item of a stream that runs last, and all that others can run before and behind it. False: there is none.
  bool run_last() {
    run_others();
    std::unique_lock<std::mutex> lock(mutex_);
    last_may_run_ = true;
    idle_ = false;
    wait(lock, [&] { return idle_; }, false);
    return !std::exchange(last_may_run_, false);
  }

  std::string dump() {
    std::lock_guard<std::mutex> lock(mutex_);
    return describe();
  }

  void dump_on_signal(int number, const char* path) {
    dump_path_ = path;
    struct sigaction action {};
    action.sa_handler = [](int) { dump_asked_ = 1; };  // only sets a flag: the executor writes the file
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }

 private:
  Queues() {
    add_stream();  // the default stream: 0
    executor_ = std::thread([this] { execute(); });
  }

  StreamQueue& at(int64_t id) {
    if (id < 0 || static_cast<size_t>(id) >= streams_.size()) {
      throw std::runtime_error("no stream " + std::to_string(id) + " on the simulated device");
    }
    return *streams_[static_cast<size_t>(id)];
  }

  int64_t add_stream() {
    auto stream = std::make_unique<StreamQueue>();
    stream->id = static_cast<int64_t>(streams_.size());
    if (stream->id > 0) {
      stream->order = ++streams_since_configure_;
      auto found = options_.late_by_order.find(stream->order);
      stream->late = found == options_.late_by_order.end() ? options_.other_late : found->second;
    }
    streams_.push_back(std::move(stream));
    return streams_.back()->id;
  }

  void raise_if_dead() const {
    if (dead_) throw DeviceError(reason_);
  }

  // Block the calling host thread. The executor holds nothing back meanwhile: what runs last, too, if that is needed.
  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, Condition condition, bool last = true) {
    raise_if_dead();
    if (condition()) return;
    std::function<bool()> unmet = [&] { return !condition(); };
    if (last) unmet_.push_back(&unmet);
    ++waiting_;
    executor_wakes_.notify_one();
    host_wakes_.wait(lock, [&] { return dead_ || condition(); });
    --waiting_;
    std::erase(unmet_, &unmet);
    if (dead_) host_wakes_.notify_all();  // configure() waits for the last one
    raise_if_dead();
  }

  void set_dead(const std::string& reason) {
    if (dead_) return;
    dead_ = true;
    reason_ = reason;
    wake_all();
  }

  void wake_all() {
    host_wakes_.notify_all();
    executor_wakes_.notify_one();
  }

  void drop_all() {
    for (auto& stream : streams_) {
      for (Item& item : stream->items) {
        if (item.mark) item.mark->passed = true;  // seen only after a later configure(): a dead device raises
      }
      stream->items.clear();
      stream->done = stream->launched;
    }
    counted_ = 0;
  }

  void execute() {
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);  // 1 us: the default of 50 us would stretch each hold
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
      if (dump_asked_) {
        dump_asked_ = 0;
        write_dump();
      }
      if (dead_) drop_all();
      release_memory(kFreeAtOnce);
      bool waits_for_host = false;
      StreamQueue* stream = pick(waits_for_host);
      if (!stream) {
        idle_ = true;
        if (when_full_ && waiting_ && counted_ >= options_.limit) {
          __atomic_store_n(std::exchange(when_full_, nullptr), 1, __ATOMIC_RELEASE);
        }
        release_memory(1);
        if (waiting_) host_wakes_.notify_all();
        executor_wakes_.wait_for(lock, waits_for_host ? kPoll : kIdle);
        continue;
      }
      if (!options_.in_order && !waiting_ && flip(stream->late)) {
        executor_wakes_.wait_for(lock, kHold);
        continue;
      }
      run_head(lock, *stream);
    }
    drop_all();
  }

  // A stream whose head may run now, or null.
  StreamQueue* pick(bool& waits_for_host) {
    candidates_.clear();
    last_.clear();
    double total = 0;
    for (auto& stream : streams_) {
      if (stream->items.empty()) continue;
      const Item& head = stream->items.front();
      if (!head.ready()) {
        waits_for_host |= head.wait_address != nullptr;
        continue;
      }
      if (stream->late >= 1 && !options_.in_order) {
        last_.push_back(stream.get());
        continue;
      }
      candidates_.push_back(stream.get());
      total += 1.0 - stream->late;
    }
    if (candidates_.empty()) {
      // Not as long as a thread takes to wake: what it waits for has happened.
      const bool needed = std::any_of(unmet_.begin(), unmet_.end(), [](auto* unmet) { return (*unmet)(); });
      if (last_.empty() || !(last_may_run_ || needed)) return nullptr;
      last_may_run_ = false;
      return last_[std::uniform_int_distribution<size_t>(0, last_.size() - 1)(random_)];
    }
    if (options_.in_order) {
      return *std::min_element(candidates_.begin(), candidates_.end(), [](StreamQueue* a, StreamQueue* b) {
        return a->items.front().id < b->items.front().id;
      });
    }
    double left = std::uniform_real_distribution<double>(0.0, total)(random_);
    for (StreamQueue* stream : candidates_) {
      left -= 1.0 - stream->late;
      if (left < 0) return stream;
    }
    return candidates_.back();
  }

  bool flip(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>(0.0, 1.0)(random_) < probability;
  }

  void run_head(std::unique_lock<std::mutex>& lock, StreamQueue& stream) {
    Item& item = stream.items.front();  // stays in the queue while it runs: deque references survive push_back
    running_ = true;
    lock.unlock();
    std::string error;
    try {
      if (item.run) item.run();
    } catch (const std::exception& caught) {
      error = item.name + ": " + caught.what();
    }
    item.run = nullptr;  // frees what it captured before the item counts as done
    lock.lock();
    running_ = false;
    if (!error.empty()) set_dead(error);  // as after a device-side assertion
    if (item.mark) {
      item.mark->time_ms = now_ms();
      item.mark->passed.store(true, std::memory_order_release);
    }
    counted_ -= item.counted;
    ++stream.done;
    stream.items.pop_front();
    if (dies_after_ && --dies_after_ == 1) {
      dies_after_ = 0;
      set_dead("died by request after a number of items");
    }
    if (waiting_ || dead_) host_wakes_.notify_all();
  }

  void release_memory(size_t least) {
    if (to_free_.size() < least) return;
    uint64_t oldest = last_id_ + 1;
    for (auto& stream : streams_) {
      if (!stream->items.empty()) oldest = std::min(oldest, stream->items.front().id);
    }
    auto kept = std::partition(to_free_.begin(), to_free_.end(), [&](auto& entry) { return entry.first >= oldest; });
    for (auto entry = kept; entry != to_free_.end(); ++entry) std::free(entry->second);
    to_free_.erase(kept, to_free_.end());
  }

  std::string describe() const {
    std::ostringstream text;
    text << "simulated device: " << (dead_ ? "dead (" + reason_ + ")" : std::string("alive")) << ", " << counted_
         << " queued entries";
    if (options_.limit) text << " of " << options_.limit;
    text << ", " << waiting_ << " blocked host threads\n";
    for (auto& stream : streams_) {
      if (stream->items.empty()) continue;
      const Item& head = stream->items.front();
      text << "stream " << stream->id << " (order " << stream->order << ", late " << stream->late << "): "
           << stream->items.size() << " items, item " << stream->done.load() + 1 << " is " << head.name;
      if (head.after && !head.after->passed) {
        text << ", waits for item " << head.after->position << " of stream " << head.after->stream;
      }
      if (head.wait_address && !head.ready()) {
        text << ", waits for " << head.wait_value << ", found "
             << __atomic_load_n(head.wait_address, __ATOMIC_ACQUIRE);
      }
      text << "; then:";
      for (size_t i = 1; i < std::min<size_t>(stream->items.size(), 6); ++i) text << " " << stream->items[i].name;
      text << "\n";
    }
    return text.str();
  }

  void write_dump() const {
    if (std::FILE* file = std::fopen(dump_path_.c_str(), "w")) {
      const std::string text = describe();
      std::fwrite(text.data(), 1, text.size(), file);
      std::fclose(file);
    }
  }

  static constexpr auto kPoll = std::chrono::microseconds(50);   // of a number in host memory
  static constexpr auto kHold = std::chrono::microseconds(20);   // after a stream was passed over
  static constexpr auto kIdle = std::chrono::milliseconds(100);  // a signal for a dump does not notify

  static constexpr size_t kFreeAtOnce = 64;

  std::mutex mutex_;
  std::condition_variable executor_wakes_, host_wakes_;
  std::vector<std::unique_ptr<StreamQueue>> streams_;  // the index is the id; none is removed
  std::vector<StreamQueue*> candidates_, last_;  // whose heads may run
  std::vector<std::function<bool()>*> unmet_;     // whether a blocked host thread still needs the device
  std::vector<std::pair<uint64_t, void*>> to_free_;
  Options options_;
  std::mt19937_64 random_;
  size_t counted_ = 0;
  size_t waiting_ = 0;  // host threads that block
  uint64_t last_id_ = 0;
  uint32_t* when_full_ = nullptr;
  uint64_t dies_after_ = 0;  // 0: does not; n: after n - 1 more items
  int64_t streams_since_configure_ = 0;
  bool running_ = false, idle_ = false, dead_ = false, stopped_ = false, last_may_run_ = false;
  std::string reason_, dump_path_;
  static inline volatile sig_atomic_t dump_asked_ = 0;
  std::thread executor_;
};

// The current stream of the calling thread.
inline int64_t& current_stream() {
  static thread_local int64_t stream = 0;
  return stream;
}

// Names of the host's waits, and how often each happened.
class Counts {
 public:
  static Counts& get() {
    static Counts* counts = new Counts();
    return *counts;
  }

  void add(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[name];
  }

  std::map<std::string, int64_t> copy() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace sim
