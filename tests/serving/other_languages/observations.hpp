// What both programs of calls need: observations of a Dict space, and a check that ends the program.

#ifndef OBSERVATIONS_HPP
#define OBSERVATIONS_HPP

#include <cstdlib>
#include <iostream>

#include "corral_client.hpp"

using corral::Array;
using corral::Tree;

inline void check(bool is_right, const char* what) {
    if (is_right) return;
    std::cerr << "wrong: " << what << "\n";
    std::exit(1);
}

inline Tree observe(int count, int first) {
    std::vector<std::uint8_t> image;
    std::vector<double> place;
    std::vector<std::int64_t> number;
    for (int i = first; i < first + count; ++i) {
        for (int k = 0; k < 4; ++k) image.push_back(static_cast<std::uint8_t>(10 * i + k));
        place.push_back(i + 0.25);
        number.push_back(i % 5);
    }
    const auto k = static_cast<std::size_t>(count);
    const Tree pair = Tree::tuple({Array::of(place, {k, 1}), Array::of(number)});
    return Tree::dict({{"image", Array::of(image, {k, 2, 2})}, {"pair", pair}});
}

#endif  // OBSERVATIONS_HPP
