// Runs the kernels in an emulator on behalf of another process, whose memory they read and write at its own addresses.
//
// A page is copied from the other process when the kernels first touch it: the handler of the segmentation fault requests it. After a
// call, the words that changed are sent back. Requests: a function's index and 16 numbers. Replies: 'F' and an address for a page, 'T'
// and a text, or 'D', the result, and the changed words.

#include "kernels.cpp"
#include "multiply.cpp"

#include <csignal>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t PAGE = 4096, MOST_PAGES = 1 << 16;
uint8_t *copies; // [MOST_PAGES, PAGE] as they were received
uint8_t *pages[MOST_PAGES];
size_t count;
std::atomic_flag busy = ATOMIC_FLAG_INIT;

void all(ssize_t (*move)(int, void *, size_t), int file, void *place, size_t bytes) {
    for (uint8_t *at = static_cast<uint8_t *>(place); bytes > 0;) {
        ssize_t moved = move(file, at, bytes);
        if (moved <= 0) _exit(moved == 0 ? 0 : 3);
        at += moved, bytes -= moved;
    }
}

void receive(void *place, size_t bytes) { all(read, 0, place, bytes); }

void send(const void *place, size_t bytes) {
    all([](int file, void *at, size_t size) { return write(file, at, size); }, 1, const_cast<void *>(place), bytes);
}

void fetch(int, siginfo_t *fault, void *) {
    while (busy.test_and_set(std::memory_order_acquire)) {}
    uint64_t address = reinterpret_cast<uint64_t>(fault->si_addr) & ~(PAGE - 1);
    uint8_t *place = reinterpret_cast<uint8_t *>(address);
    bool known = false; // another thread was faster
    for (size_t i = count; i-- > 0 && !known;) known = pages[i] == place;
    if (!known) {
        if (count == MOST_PAGES) _exit(4);
        char kind = 'F';
        send(&kind, 1), send(&address, sizeof address);
        receive(&kind, 1);
        if (kind != 'P') _exit(5); // not a page of the other process
        receive(copies + count * PAGE, PAGE);
        // filled elsewhere and moved, so that another thread sees the whole page or none
        void *room = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        void *free = mmap(place, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (room == MAP_FAILED || free != place) _exit(6);
        std::memcpy(room, copies + count * PAGE, PAGE);
        if (mremap(room, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place) _exit(6);
        pages[count++] = place;
    }
    busy.clear(std::memory_order_release);
}

void finish(int64_t result) {
    char kind = 'D';
    send(&kind, 1), send(&result, sizeof result);
    std::vector<uint64_t> changed;
    for (size_t i = 0; i < count; i++) {
        for (size_t at = 0; at < PAGE; at += 8) {
            uint64_t before, now;
            std::memcpy(&before, copies + i * PAGE + at, 8), std::memcpy(&now, pages[i] + at, 8);
            if (before != now) changed.push_back(reinterpret_cast<uint64_t>(pages[i] + at)), changed.push_back(now);
        }
        munmap(pages[i], PAGE);
    }
    count = 0;
    uint64_t size = changed.size() / 2;
    send(&size, sizeof size), send(changed.data(), changed.size() * 8);
}

void finish(const char *text) {
    char kind = 'T';
    uint64_t size = std::strlen(text);
    send(&kind, 1), send(&size, sizeof size), send(text, size);
}

float real(int64_t bits) {
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

} // namespace

int main() {
    copies = static_cast<uint8_t *>(mmap(nullptr, MOST_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    struct sigaction action = {};
    action.sa_sigaction = fetch, action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    for (;;) {
        int64_t index, a[16];
        receive(&index, sizeof index), receive(a, sizeof a);
        auto at = [&](int i) { return reinterpret_cast<float *>(a[i]); };
        auto product = [&] { return reinterpret_cast<const Product *>(a[0]); };
        auto model = [&] { return reinterpret_cast<const Model *>(a[0]); };
        switch (index) { // in the order of emulated.py
            case 0: finish(foresay_check(model())); break;
            case 1: finish(foresay_pass(model(), reinterpret_cast<const Pass *>(a[1]))); break;
            case 2: finish(foresay_multiply(product(), at(1), at(2), a[3], a[4], a[5])); break;
            case 3:
                finish(foresay_pack(a[0], reinterpret_cast<const uint8_t *const *>(a[1]), a[2], a[3], reinterpret_cast<uint8_t *>(a[4]),
                                    reinterpret_cast<uint8_t *>(a[5]), a[6]));
                break;
            case 4: finish(foresay_rows(product(), reinterpret_cast<const int64_t *>(a[1]), a[2], at(3))); break;
            case 5: finish(foresay_add_norm(at(0), at(1), at(2), real(a[3]), at(4), at(5), a[6], a[7], real(a[8]))); break;
            case 6: finish(foresay_gate(reinterpret_cast<const Gate *>(a[0]), at(1), at(2), a[3], a[4])); break;
            case 7: finish(foresay_attend(reinterpret_cast<const Attention *>(a[0]), at(1), at(2), at(3), a[4], a[5])); break;
            case 8: finish(foresay_bf16_dots()); break;
            case 9: finish(foresay_struct_size(a[0])); break;
            case 10: finish(foresay_instructions()); break;
            case 11: finish(foresay_message()); break;
            case 12: finish(foresay_tiles()); break;
            case 13:
                finish(foresay_chain(model(), reinterpret_cast<const Pass *>(a[1]), reinterpret_cast<const Chain *>(a[2]),
                                     reinterpret_cast<int64_t *>(a[3])));
                break;
            case 14:
                finish(foresay_tree(model(), reinterpret_cast<const Pass *>(a[1]), reinterpret_cast<const Chain *>(a[2]),
                                    reinterpret_cast<const Tree *>(a[3]), reinterpret_cast<int64_t *>(a[4])));
                break;
            default: return 7;
        }
    }
}
