// What Python calls. Functions that take a lock of the pool may be called with the GIL: no holder of it needs the GIL.
#include "pool.h"

namespace zenflow {

struct LateWrite {
  uint32_t* word;
  uint32_t value;
};

// A thread of the driver calls it. It must not block: all host functions of a context may share that thread.
void write_late(void* given) {
  const LateWrite* const write = static_cast<LateWrite*>(given);
  __atomic_store_n(write->word, write->value, __ATOMIC_RELEASE);
  delete write;
}

}  // namespace zenflow

using zenflow::Job;
using zenflow::Pool;

extern "C" {

// Python compares them with its own structures, in this order.
int64_t zenflow_bytes(int structure) {
  const int64_t bytes[] = {sizeof(zenflow::Step), sizeof(zenflow::StoredState), sizeof(zenflow::UpdateWindow), sizeof(zenflow::Gate),
                           sizeof(zenflow::Record), sizeof(zenflow::LateScale), sizeof(zenflow::Exchange),
                           sizeof(zenflow::FileChunk), sizeof(zenflow::Transfer), sizeof(Job)};
  return bytes[structure];
}

// As a job does, in the calling thread.
int64_t zenflow_move_chunk(zenflow::Transfer* transfer, int write) {
  return write ? zenflow::write_chunk(*transfer) : zenflow::read_chunk(*transfer);
}

// CRC-32 of bytes, as a transfer takes it.
uint32_t zenflow_crc32(const unsigned char* bytes, int64_t count) { return zenflow::crc32(bytes, count, 0); }

// Stores the new pool in *pool, in Python's memory: an interrupt after the call does not lose it. Returns 0 or an error
// number.
int zenflow_open(Pool** pool, int workers, const int32_t* cores, int64_t poll_ns, const char* name) {
  try {
    *pool = new Pool(workers, cores, poll_ns, name);
    return 0;
  } catch (const std::system_error& refused) {
    return refused.code().value();
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
}

int zenflow_submit(Pool* pool, Job* const* jobs, int64_t count) { return pool->submit(jobs, count); }

// Without a pool the job was never queued.
void zenflow_abort(Pool* pool, Job* job) {
  if (pool) return pool->abort(job);
  if (!job->settled) zenflow::fail_job(job);
}

// Returns whether the calling process may wait: not in a forked child, or without a pool.
int zenflow_wait(Pool* pool, const Job* job, int settled, int64_t timeout_ns) {
  if (!pool || pool->in_child()) return 0;
  pool->wait(job, settled != 0, timeout_ns);
  return 1;
}

// After a plain load of a state, and before what it stands for is read: what a load with acquire does by itself.
void zenflow_acquire() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

// Has the driver write a word of host memory when a stream gets there. `launch` is cuLaunchHostFunc, or like it. Returns
// its error.
int zenflow_write_behind(int (*launch)(void*, void (*)(void*), void*), void* stream, uint32_t* word, uint32_t value) {
  auto* const write = new (std::nothrow) zenflow::LateWrite{word, value};
  const int error = write ? launch(stream, zenflow::write_late, write) : ENOMEM;
  if (error) delete write;
  return error;
}

// Both end the threads, and may be repeated. The pool is never freed: a thread may still be in zenflow_wait.
int zenflow_close(Pool* pool, int64_t timeout_ns) { return pool->close(timeout_ns); }
void zenflow_end(Pool* pool) { pool->end(); }
}
