// Drafts a tree with a draft head: level by level the likeliest nodes get children, and the most probable of all nodes are kept
// (EAGLE-2, Li et al. 2024). The tokens are chosen, not drawn, so that any of them may be dropped.

#pragma once

#include "chain.h"

namespace foresay {

constexpr int64_t MOST_BRANCHES = 64;

struct Tree {
    int64_t branches, width, levels; // children of a node; nodes of a level that get children; passes at most
    // A level gets children while probability * (path probability of a node) - each adds up to more than `threshold` of the chain over
    // the nodes that would get them; nodes are kept while it exceeds `least`.
    double each, least;
    int64_t *parents; // out, [most], of the kept nodes: index of the parent, -1 for the known tokens
    int64_t *passes;  // out, [1]
};

inline void check(const Tree &t, const Chain &c, const Pass &pass) {
    require(t.branches > 0 && t.branches <= MOST_BRANCHES, "branches", t.branches, "in [1, 64]");
    require(t.width > 0 && t.width <= MOST_BRANCHES, "width", t.width, "in [1, 64]");
    require(t.levels > 0 && t.levels <= c.most, "levels", t.levels, "in [1, most]");
    check_pointer("parents", t.parents), check_pointer("passes", t.passes), check_pointer("rows", pass.rows);
}

struct Node {
    int64_t token, parent, row, column; // row: of its parent in the pass that scored it; column: its own, once it was fed
    double probability;                 // product of the probabilities along its path
};

// Indices of the greatest scores, greatest first, the lower index first of equal ones; NaN is none of them. Returns their number.
inline int64_t greatest(const float *scores, int64_t size, int64_t most, int64_t *out) {
    constexpr int64_t BLOCK = 64;
    int64_t found = 0;
    for (int64_t from = 0; from < size; from += BLOCK) {
        int64_t to = std::min(from + BLOCK, size);
        if (found == most) {
            float top = scores[from], least = scores[out[found - 1]];
#pragma omp simd reduction(max : top)
            for (int64_t i = from; i < to; i++) top = scores[i] > top ? scores[i] : top;
            if (top <= least) continue;
        }
        for (int64_t i = from; i < to; i++) {
            if (scores[i] != scores[i] || (found == most && !(scores[i] > scores[out[found - 1]]))) continue;
            int64_t j = found < most ? found++ : found - 1;
            for (; j > 0 && scores[i] > scores[out[j - 1]]; j--) out[j] = out[j - 1];
            out[j] = i;
        }
    }
    return found;
}

class TreeDraft {
  public:
    TreeDraft(const Model &model, const Pass &first, const Chain &chain, const Tree &tree)
        : hidden_(model.hidden), first_(first), chain_(chain), tree_(tree), base_(first.slots[first.tokens - 1] + 1),
          position_(first.positions[first.tokens - 1]) {
        int64_t rows = std::max(first.tokens, tree.width);
        read_.resize(2 * hidden_ * rows), x_.resize(hidden_ * rows), before_.resize(hidden_ * rows), normed_.resize(hidden_ * tree.width);
        scores_.resize(chain.scores->outputs * tree.width);
        rows_.assign(tree.width, *first.rows), starts_.assign(tree.width, base_);
    }

    template <class F> int64_t run(const Model &model, const F &body) {
        Pass pass = first_;
        pass.read = read_.data(), pass.rotated = &chain_.rotated, pass.cosines = &cosines_, pass.sines = &sines_;
        cosines_ = chain_.cosines + *first_.positions * chain_.rotated, sines_ = chain_.sines + *first_.positions * chain_.rotated;
        check(model, pass);
        read_inputs(chain_, chain_.known, pass, hidden_, read_.data());
        body(pass);
        int64_t last = first_.tokens - 1;
        std::memcpy(before_.data(), pass.x + last * hidden_, hidden_ * sizeof(float));
        fed_ = {-1};
        add_children(pass.normed + last * hidden_, static_cast<int>(pass.threads));
        int64_t level = 1;
        for (; level < tree_.levels && choose(); level++) {
            feed(pass, level);
            check(model, pass);
            read_inputs(chain_, tokens_.data(), pass, hidden_, read_.data());
            body(pass);
            before_.swap(x_);
            add_children(pass.normed, static_cast<int>(pass.threads));
        }
        *tree_.passes = level;
        return keep();
    }

  private:
    // Adds the likeliest children of each fed node. normed: [fed, hidden], outputs of their pass after the last norm.
    void add_children(const float *normed, int threads) {
        int64_t outputs = chain_.scores->outputs, count = static_cast<int64_t>(fed_.size()), at[MOST_BRANCHES];
        multiply(*chain_.scores, normed, hidden_, count, scores_.data(), threads);
        newest_ = nodes_.size();
        for (int64_t r = 0; r < count; r++) {
            const float *scores = scores_.data() + r * outputs;
            int64_t found = greatest(scores, outputs, std::min(tree_.branches, outputs), at);
            if (found == 0) continue;
            double path = fed_[r] < 0 ? 1.0 : nodes_[fed_[r]].probability;
            double likeliest = confidence_of(scores, outputs, at[0]);
            for (int64_t i = 0; i < found; i++) {
                double probability = path * likeliest * static_cast<double>(exponential(scores[at[i]] - scores[at[0]]));
                int64_t token = chain_.token_ids == nullptr ? at[i] : chain_.token_ids[at[i]];
                nodes_.push_back({token, fed_[r], r, 0, probability > 0.0 ? probability : 0.0});
            }
        }
    }

    // Orders nodes by probability; of equal ones the earlier comes first, and so a parent before its children.
    void order(std::vector<int64_t> &indices) const {
        std::stable_sort(indices.begin(), indices.end(), [&](int64_t a, int64_t b) { return nodes_[a].probability > nodes_[b].probability; });
    }

    // Chooses the nodes of the newest level that get children, into fed_; returns whether there are any that pay.
    bool choose() {
        std::vector<int64_t> open, all(nodes_.size());
        for (size_t i = 0; i < all.size(); i++) {
            all[i] = static_cast<int64_t>(i);
            if (i >= newest_ && !ends(chain_, nodes_[i].token)) open.push_back(all[i]);
        }
        order(open), order(all);
        // no child is more probable than its parent: one below the last kept node would not be kept
        double least = static_cast<int64_t>(all.size()) < chain_.most ? -1.0 : nodes_[all[chain_.most - 1]].probability;
        double total = -chain_.threshold;
        fed_.clear();
        for (int64_t node : open) {
            double probability = chain_.probability * nodes_[node].probability;
            if (static_cast<int64_t>(fed_.size()) == tree_.width || !(probability > tree_.each) || nodes_[node].probability <= least) break;
            fed_.push_back(node), total += probability - tree_.each;
        }
        return !fed_.empty() && total > 0.0;
    }

    // Makes `pass` the one over the chosen nodes: each attends to the known tokens and to its path.
    void feed(Pass &pass, int64_t level) {
        int64_t count = static_cast<int64_t>(fed_.size()), columns = num_fed_ + count, position = position_ + level;
        slots_.resize(count), positions_.assign(count, position), tokens_.resize(count);
        seen_.assign(count * columns, 0);
        turned_.resize(2 * count * chain_.rotated);
        for (int64_t i = 0; i < count; i++) {
            Node &node = nodes_[fed_[i]];
            node.column = num_fed_ + i, slots_[i] = base_ + node.column, tokens_[i] = node.token;
            for (int64_t at = fed_[i]; at >= 0; at = nodes_[at].parent) seen_[i * columns + nodes_[at].column] = 1;
            std::memcpy(x_.data() + i * hidden_, before_.data() + node.row * hidden_, hidden_ * sizeof(float));
            std::memcpy(turned_.data() + i * chain_.rotated, chain_.cosines + position * chain_.rotated, chain_.rotated * sizeof(float));
            std::memcpy(turned_.data() + (count + i) * chain_.rotated, chain_.sines + position * chain_.rotated, chain_.rotated * sizeof(float));
        }
        cosines_ = turned_.data(), sines_ = turned_.data() + count * chain_.rotated;
        pass.tokens = count, pass.columns = columns, pass.rows = rows_.data(), pass.slots = slots_.data(), pass.starts = starts_.data();
        pass.positions = positions_.data(), pass.ancestors = seen_.data(), pass.x = x_.data(), pass.normed = normed_.data();
        num_fed_ += count;
    }

    // Writes the most probable nodes, parents before children; returns their number.
    int64_t keep() const {
        std::vector<int64_t> kept(nodes_.size()), place(nodes_.size(), -1);
        for (size_t i = 0; i < kept.size(); i++) kept[i] = static_cast<int64_t>(i);
        order(kept);
        size_t count = 0, most = std::min(kept.size(), static_cast<size_t>(chain_.most));
        while (count < most && (count == 0 || chain_.probability * nodes_[kept[count]].probability > tree_.least)) count++;
        kept.resize(count);
        std::sort(kept.begin(), kept.end());
        for (size_t i = 0; i < count; i++) {
            const Node &node = nodes_[kept[i]];
            place[kept[i]] = static_cast<int64_t>(i);
            chain_.tokens[i] = node.token, chain_.confidences[i] = static_cast<float>(node.probability);
            tree_.parents[i] = node.parent < 0 ? -1 : place[node.parent];
        }
        return static_cast<int64_t>(count);
    }

    int64_t hidden_;
    const Pass &first_;
    const Chain &chain_;
    const Tree &tree_;
    int64_t base_, position_, num_fed_ = 0; // slot of the first node; position of the last known token; nodes fed so far
    size_t newest_ = 0;                     // first node of the newest level
    std::vector<Node> nodes_;
    std::vector<int64_t> fed_, rows_, starts_, slots_, positions_, tokens_; // of the present pass; fed_: its nodes, -1 for the known tokens
    std::vector<uint8_t> seen_;
    std::vector<float> read_, x_, before_, normed_, scores_, turned_; // before_: outputs of the pass before
    const float *cosines_ = nullptr, *sines_ = nullptr;
};

// Returns the number of nodes. pass: as of a chain. run: body(pass) runs the model.
template <class F> int64_t draft(const Model &model, const Pass &first, const Chain &c, const Tree &t, const F &run) {
    return TreeDraft(model, first, c, t).run(model, run);
}

} // namespace foresay
