// A pool of threads that share the tasks of one stage after another.
//
// Each free thread takes the next task. The caller takes tasks too, and waits only for tasks that another thread has started. A thread
// that the operating system has not scheduled delays no other, unlike with barriers between all threads on a busy machine.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace foresay {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

class Pool {
  public:
    typedef void (*Task)(const void *what, int64_t index);

    // Runs task(what, i) for all i < count on `threads` threads, the caller included. Rethrows an exception of a task after all tasks
    // have ended.
    void run(Task task, const void *what, int64_t count, int threads) {
        if (threads <= 1 || count <= 1 || count >= LIMIT || !mine_.try_lock()) {
            for (int64_t i = 0; i < count; i++) task(what, i);
            return;
        }
        wanted(threads - 1);
        task_ = task, what_ = what;
        done_.store(0, std::memory_order_relaxed);
        uint64_t turn = (ticket_.load(std::memory_order_relaxed) >> 40) + 1;
        ticket_.store(turn << 40 | static_cast<uint64_t>(count) << 20);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> hold(door_);
            bell_.notify_all();
        }
        while (take()) {}
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) spins < 256 ? relax() : std::this_thread::yield();
        std::exception_ptr thrown;
        std::swap(thrown, thrown_); // no worker accesses it any more
        mine_.unlock();
        if (thrown) std::rethrow_exception(thrown);
    }

  private:
    static constexpr int64_t LIMIT = 1 << 20;
    static constexpr int SPINS = 4000; // while a worker waits for the next stage

    // Ticket: 24 bits for the number of the stage, 20 for its number of tasks, 20 for the index of the next task.
    bool take() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while ((ticket & (LIMIT - 1)) < (ticket >> 20 & (LIMIT - 1))) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            try {
                task_(what_, static_cast<int64_t>(ticket & (LIMIT - 1))); // the stage does not end before this task
            } catch (...) {
                std::lock_guard<std::mutex> hold(door_);
                thrown_ = std::current_exception();
            }
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
        return false;
    }

    // Sets the number of active workers; all others sleep until they are activated again.
    void wanted(int workers) {
        while (count_ < workers) {
            int index = count_;
            try {
                std::thread([this, index] { work(index); }).detach();
            } catch (const std::exception &) {
                break; // no more threads, or no memory for one
            }
            count_++;
        }
        if (active_.load() == workers) return;
        std::lock_guard<std::mutex> hold(door_);
        active_.store(workers);
        bench_.notify_all();
    }

    void work(int index) {
        for (;;) {
            uint64_t seen = ticket_.load() >> 40; // read before taking tasks, so that no new stage is missed
            while (take()) {}
            bool again = false;
            for (int spins = 0; spins < SPINS && !again; spins++) {
                relax();
                again = ticket_.load(std::memory_order_relaxed) >> 40 != seen;
            }
            if (again && index < active_.load(std::memory_order_relaxed)) continue;
            std::unique_lock<std::mutex> hold(door_);
            if (index >= active_.load()) {
                bench_.wait(hold, [&] { return index < active_.load(); });
                continue;
            }
            asleep_.fetch_add(1);
            bell_.wait(hold, [&] { return ticket_.load() >> 40 != seen; });
            asleep_.fetch_sub(1);
        }
    }

    std::mutex mine_, door_;
    std::condition_variable bell_, bench_;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> done_{0};
    std::atomic<int> active_{0}, asleep_{0};
    int count_ = 0;
    Task task_ = nullptr;
    const void *what_ = nullptr;
    std::exception_ptr thrown_; // by a task of the current stage
};

Pool &pool();

} // namespace foresay
