// Checks of values in tensors that become addresses.
//
// The functions that Python calls check them before they read or write anything else, and return
// whether the call is refused, so that no caller of an inner function goes unchecked. Python then
// raises the error.

#pragma once

#include <algorithm>
#include <cstdint>

constexpr int64_t ACCEPTED = 0, REFUSED = 1;

// Return whether slots of a batch are rows of a pool of `states`, or -1 for none. If they are null,
// each row of the batch has the state of its own number.
inline bool are_slots(const int64_t* slots, int64_t batch, int64_t states) {
    if (!slots) return batch <= states;
    return std::all_of(slots, slots + batch,
                       [=](int64_t slot) { return slot >= -1 && slot < states; });
}

// Return whether sequences follow one another within a row of `tokens`, none of them longer than
// `longest`. No sum can overflow.
inline bool are_sequences(const int64_t* starts, const int64_t* lengths, int64_t count,
                          int64_t tokens, int64_t longest) {
    int64_t end = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (lengths[i] < 0 || lengths[i] > longest || starts[i] < end ||
            starts[i] > tokens - lengths[i])
            return false;
        end = starts[i] + lengths[i];
    }
    return true;
}
