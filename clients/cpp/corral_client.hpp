// The C++ client of Corral's policy server, in one header that needs C++17, POSIX sockets and nothing else.
//
// A simulator that drives itself asks for its actions:
//
//     corral::PolicyClient client("127.0.0.1:5555", 2);
//     auto actions = client.begin(obs);        // two episodes begin; obs is a corral::Array of shape {2, ...}
//     for (;;) {
//         ...                                  // the simulator steps with actions.array().as<int>()
//         actions = client.step(obs, rewards, terminated, truncated, next_obs);
//     }                                        // corral::ServerStopped ends it when the training is over
//
// With `Options::load_model`, the server sends the policy, as an ONNX file, and the client chooses the actions itself: the
// same calls return at once, and the steps are sent in larger messages. `load_model` is yours, so that this header needs
// no ONNX runtime; onnxruntime_loader.hpp has one.
//
// The connection is a TCP or a Unix socket in plain text. There is no TLS: to reach a server that asks for it, use a
// tunnel, such as ssh or stunnel. A client belongs to one thread. The messages are those of the page "The protocol of
// the policy server"; numbers travel with the lowest byte first, so that only such machines are supported.

#ifndef CORRAL_CLIENT_HPP
#define CORRAL_CLIENT_HPP

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "corral_client.hpp supports only machines that store the lowest byte first"
#endif

namespace corral {

// Version of the protocol.
inline constexpr int PROTOCOL = 1;
// Size of the largest message that the client accepts.
inline constexpr std::size_t MAX_MESSAGE_BYTES = 64u * 1024 * 1024;
// Lists and maps inside each other that the client accepts.
inline constexpr int MAX_DEPTH = 32;
// Seconds after which a client that acts itself sends its steps, also if they are few.
inline constexpr double MAX_DELAY_S = 1.0;

// The server refused a message: `code()` is the kind of the error, and `what()` says what was wrong and where.
class ClientError : public std::runtime_error {
   public:
    ClientError(std::string code, const std::string& message) : std::runtime_error(message), code_(std::move(code)) {}
    const std::string& code() const noexcept { return code_; }

   private:
    std::string code_;
};

// The server does not know the episodes of this client any more: reset all envs, and call `begin` again.
class EpisodesLost : public ClientError {
   public:
    using ClientError::ClientError;
};

// The training is over, or the server was not reached for `retry_s` seconds.
class ServerStopped : public ClientError {
   public:
    using ClientError::ClientError;
};

// A value of msgpack, without extension types; the keys of maps are texts.
struct Value {
    enum class Kind { nil, boolean, integer, unsigned_integer, number, text, bytes, list, map };

    Kind kind = Kind::nil;
    bool boolean = false;
    std::int64_t integer = 0;            // an integer that int64 holds
    std::uint64_t unsigned_integer = 0;  // a larger one
    double number = 0;
    std::string text;  // of a text or of bytes
    std::vector<std::string> names;
    std::vector<Value> parts;  // of a list, or of a map in the order of `names`

    Value() = default;
    Value(bool value) : kind(Kind::boolean), boolean(value) {}
    Value(int value) : kind(Kind::integer), integer(value) {}
    Value(std::int64_t value) : kind(Kind::integer), integer(value) {}
    Value(double value) : kind(Kind::number), number(value) {}
    Value(const char* value) : kind(Kind::text), text(value) {}
    Value(std::string value) : kind(Kind::text), text(std::move(value)) {}
    Value(const std::map<std::string, Value>& value) : kind(Kind::map) {
        for (const auto& [name, part] : value) {
            names.push_back(name);
            parts.push_back(part);
        }
    }
    Value(std::vector<Value> value) : kind(Kind::list), parts(std::move(value)) {}

    // Returns the value of a key of a map, or nullptr.
    const Value* find(const std::string& name) const {
        for (std::size_t i = 0; i < names.size(); ++i) {
            if (names[i] == name) return &parts[i];
        }
        return nullptr;
    }
};

namespace detail {

[[noreturn]] inline void damaged(const std::string& what) {
    throw ClientError("message", "the server sent a damaged message: " + what);
}

// Writes msgpack.
class Packer {
   public:
    std::string bytes;

    void nil() { put(0xc0); }
    void boolean(bool value) { put(value ? 0xc3 : 0xc2); }
    void integer(std::int64_t value) {
        if (value >= 0) {
            unsigned_integer(static_cast<std::uint64_t>(value));
        } else if (value >= -32) {
            put(static_cast<std::uint8_t>(value));
        } else {
            put(0xd3);
            big_endian(static_cast<std::uint64_t>(value), 8);
        }
    }
    void unsigned_integer(std::uint64_t value) {
        if (value < 0x80) {
            put(static_cast<std::uint8_t>(value));
        } else if (value <= 0xffffffffu) {
            put(0xce);
            big_endian(value, 4);
        } else {
            put(0xcf);
            big_endian(value, 8);
        }
    }
    void number(double value) {
        std::uint64_t bits;
        std::memcpy(&bits, &value, 8);
        put(0xcb);
        big_endian(bits, 8);
    }
    void text(const std::string& value) {
        if (value.size() < 32) {
            put(static_cast<std::uint8_t>(0xa0 | value.size()));
        } else {
            put(0xdb);
            big_endian(size32(value.size()), 4);
        }
        bytes += value;
    }
    void blob(const void* data, std::size_t size) {
        put(0xc6);
        big_endian(size32(size), 4);
        bytes.append(static_cast<const char*>(data), size);
    }
    void list(std::size_t size) { head(size, 0x90, 0xdd); }
    void map(std::size_t size) { head(size, 0x80, 0xdf); }
    void value(const Value& value, int depth = 0) {
        if (depth > MAX_DEPTH) throw std::invalid_argument("a value is nested too deep to be sent");
        switch (value.kind) {
            case Value::Kind::nil: return nil();
            case Value::Kind::boolean: return boolean(value.boolean);
            case Value::Kind::integer: return integer(value.integer);
            case Value::Kind::unsigned_integer: return unsigned_integer(value.unsigned_integer);
            case Value::Kind::number: return number(value.number);
            case Value::Kind::text: return text(value.text);
            case Value::Kind::bytes: return blob(value.text.data(), value.text.size());
            case Value::Kind::list: list(value.parts.size()); break;
            case Value::Kind::map: map(value.parts.size()); break;
        }
        for (std::size_t i = 0; i < value.parts.size(); ++i) {
            if (value.kind == Value::Kind::map) text(value.names[i]);
            this->value(value.parts[i], depth + 1);
        }
    }

   private:
    void put(unsigned byte) { bytes.push_back(static_cast<char>(byte)); }
    void big_endian(std::uint64_t value, int size) {
        for (int shift = 8 * (size - 1); shift >= 0; shift -= 8) put(static_cast<std::uint8_t>(value >> shift));
    }
    void head(std::size_t size, unsigned small, unsigned large) {
        if (size < 16) {
            put(small | static_cast<unsigned>(size));
        } else {
            put(large);
            big_endian(size32(size), 4);
        }
    }
    static std::size_t size32(std::size_t size) {
        if (size > 0xffffffffu) throw std::invalid_argument("a value is too large to be sent");
        return size;
    }
};

// Reads msgpack. No size is trusted before the bytes are there.
class Unpacker {
   public:
    explicit Unpacker(const std::string& bytes) : next_(bytes.data()), end_(bytes.data() + bytes.size()) {}

    Value read_all() {
        Value found = read(0);
        if (next_ != end_) damaged("bytes are left over");
        return found;
    }

   private:
    const char* next_;
    const char* end_;

    std::size_t left() const { return static_cast<std::size_t>(end_ - next_); }

    std::uint64_t big_endian(std::size_t size) {
        if (left() < size) damaged("it ends too early");
        std::uint64_t found = 0;
        for (std::size_t i = 0; i < size; ++i) found = found << 8 | static_cast<std::uint8_t>(*next_++);
        return found;
    }

    std::string chars(std::uint64_t size) {
        if (size > left()) damaged("it ends too early");
        std::string found(next_, static_cast<std::size_t>(size));
        next_ += size;
        return found;
    }

    static Value of(Value::Kind kind) {
        Value found;
        found.kind = kind;
        return found;
    }

    static Value signed_value(std::int64_t integer) { return Value(integer); }

    static Value unsigned_value(std::uint64_t integer) {
        if (integer <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
            return Value(static_cast<std::int64_t>(integer));
        Value found = of(Value::Kind::unsigned_integer);
        found.unsigned_integer = integer;
        return found;
    }

    Value text(std::uint64_t size, Value::Kind kind) {
        Value found = of(kind);
        found.text = chars(size);
        return found;
    }

    Value list(std::uint64_t size, int depth) {
        if (size > left()) damaged("it ends too early");  // each part has at least one byte
        Value found = of(Value::Kind::list);
        for (std::uint64_t i = 0; i < size; ++i) found.parts.push_back(read(depth + 1));
        return found;
    }

    Value map(std::uint64_t size, int depth) {
        if (size > left() / 2) damaged("it ends too early");
        Value found = of(Value::Kind::map);
        for (std::uint64_t i = 0; i < size; ++i) {
            Value name = read(depth + 1);
            if (name.kind != Value::Kind::text) damaged("the key of a map is no text");
            found.names.push_back(std::move(name.text));
            found.parts.push_back(read(depth + 1));
        }
        return found;
    }

    Value read(int depth) {
        if (depth > MAX_DEPTH) damaged("it is nested too deep");
        const auto head = static_cast<unsigned>(big_endian(1));
        if (head < 0x80) return Value(static_cast<std::int64_t>(head));
        if (head < 0x90) return map(head & 0x0f, depth);
        if (head < 0xa0) return list(head & 0x0f, depth);
        if (head < 0xc0) return text(head & 0x1f, Value::Kind::text);
        if (head >= 0xe0) return Value(static_cast<std::int64_t>(static_cast<std::int8_t>(head)));
        switch (head) {
            case 0xc0: return Value();
            case 0xc2: return Value(false);
            case 0xc3: return Value(true);
            case 0xc4: return text(big_endian(1), Value::Kind::bytes);
            case 0xc5: return text(big_endian(2), Value::Kind::bytes);
            case 0xc6: return text(big_endian(4), Value::Kind::bytes);
            case 0xca: {
                const auto bits = static_cast<std::uint32_t>(big_endian(4));
                float found;
                std::memcpy(&found, &bits, 4);
                return Value(static_cast<double>(found));
            }
            case 0xcb: {
                const std::uint64_t bits = big_endian(8);
                double found;
                std::memcpy(&found, &bits, 8);
                return Value(found);
            }
            case 0xcc: return unsigned_value(big_endian(1));
            case 0xcd: return unsigned_value(big_endian(2));
            case 0xce: return unsigned_value(big_endian(4));
            case 0xcf: return unsigned_value(big_endian(8));
            case 0xd0: return signed_value(static_cast<std::int8_t>(big_endian(1)));
            case 0xd1: return signed_value(static_cast<std::int16_t>(big_endian(2)));
            case 0xd2: return signed_value(static_cast<std::int32_t>(big_endian(4)));
            case 0xd3: return signed_value(static_cast<std::int64_t>(big_endian(8)));
            case 0xd9: return text(big_endian(1), Value::Kind::text);
            case 0xda: return text(big_endian(2), Value::Kind::text);
            case 0xdb: return text(big_endian(4), Value::Kind::text);
            case 0xdc: return list(big_endian(2), depth);
            case 0xdd: return list(big_endian(4), depth);
            case 0xde: return map(big_endian(2), depth);
            case 0xdf: return map(big_endian(4), depth);
            default: damaged("it holds an extension type or an unknown byte");
        }
    }
};

inline const Value& field(const Value& message, const char* name, Value::Kind kind) {
    const Value* found = message.kind == Value::Kind::map ? message.find(name) : nullptr;
    if (found == nullptr || found->kind != kind) damaged(std::string("it has no ") + name);
    return *found;
}

}  // namespace detail

// Numbers of one type with a shape, of which the first length is the number of entries K.
struct Array {
    std::string dtype = "<f4";  // as NumPy writes it: "<f4", "<f8", "|u1", "<i8", ...
    std::vector<std::size_t> shape;
    std::string bytes;  // the numbers, the last index first, the lowest byte first

    // Returns the dtype of a C++ type.
    template <typename T>
    static std::string dtype_of() {
        static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, long double>, "no type of a number");
        static_assert(!std::is_floating_point_v<T> || std::numeric_limits<T>::is_iec559, "numbers are not IEEE 754");
        const char kind = std::is_same_v<T, bool> ? 'b' : std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
        return std::string(sizeof(T) == 1 ? "|" : "<") + kind + std::to_string(sizeof(T));
    }

    // Returns an array of numbers; without a shape, it has one axis.
    template <typename T>
    static Array of(const std::vector<T>& values, std::vector<std::size_t> shape) {
        static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no bytes: use std::uint8_t");
        return of(values.data(), values.size(), std::move(shape));
    }
    template <typename T>
    static Array of(const std::vector<T>& values) {
        return of(values, {values.size()});
    }

    // Returns an array of `count` numbers in one piece of memory.
    template <typename T>
    static Array of(const T* values, std::size_t count, std::vector<std::size_t> shape) {
        Array found{dtype_of<T>(), std::move(shape), {}};
        if (found.size() != count) throw std::invalid_argument("an array has more or fewer numbers than its shape");
        if (count) found.bytes.assign(reinterpret_cast<const char*>(values), count * sizeof(T));
        return found;
    }

    // Returns arrays of the same shape as one, with a new first axis.
    static Array stack(const std::vector<Array>& parts) {
        if (parts.empty()) throw std::invalid_argument("nothing to stack");
        Array found{parts[0].dtype, parts[0].shape, {}};
        found.shape.insert(found.shape.begin(), parts.size());
        for (const Array& part : parts) {
            if (part.dtype != parts[0].dtype || part.shape != parts[0].shape)
                throw std::invalid_argument("arrays of different shapes or types cannot be stacked");
            found.bytes += part.bytes;
        }
        return found;
    }

    // Returns the number of numbers.
    std::size_t size() const {
        std::size_t count = 1;
        for (const std::size_t length : shape) {
            if (length != 0 && count > std::numeric_limits<std::size_t>::max() / length)
                throw std::invalid_argument("a shape is too large");
            count *= length;
        }
        return count;
    }

    // Returns the number of entries K, the first length.
    std::size_t num_entries() const {
        if (shape.empty()) throw std::invalid_argument("the first axis of an array must be the entries");
        return shape[0];
    }

    // Returns the numbers, all entries after each other, converted to a type.
    template <typename T>
    std::vector<T> as() const {
        std::vector<T> found;
        found.reserve(size());
        with_type(dtype, [&](auto zero) {
            using From = decltype(zero);
            if (bytes.size() != size() * sizeof(From)) throw std::invalid_argument("an array has not the bytes of its shape");
            for (std::size_t i = 0; i < bytes.size(); i += sizeof(From)) {
                From value;
                std::memcpy(&value, bytes.data() + i, sizeof(From));
                found.push_back(static_cast<T>(value));
            }
        });
        return found;
    }

    // Returns the same numbers as another dtype.
    Array to(const std::string& other) const {
        if (other == dtype) return *this;
        Array found;
        with_type(other, [&](auto zero) { found = of(as<decltype(zero)>(), shape); });
        found.dtype = other;
        return found;
    }

    // Returns the numbers of one entry.
    template <typename T>
    std::vector<T> row(std::size_t entry) const {
        if (entry >= num_entries()) throw std::out_of_range("an array has no such entry");
        const std::size_t num_bytes = bytes.size() / shape[0];
        Array found{dtype, {shape.begin() + 1, shape.end()}, bytes.substr(entry * num_bytes, num_bytes)};
        return found.as<T>();
    }

   private:
    // Calls a function with a zero of the C++ type of a dtype.
    template <typename Function>
    static void with_type(const std::string& dtype, const Function& call) {
        if (dtype == "<f4") call(float{});
        else if (dtype == "<f8") call(double{});
        else if (dtype == "<i8") call(std::int64_t{});
        else if (dtype == "<i4") call(std::int32_t{});
        else if (dtype == "<i2") call(std::int16_t{});
        else if (dtype == "|i1") call(std::int8_t{});
        else if (dtype == "<u8") call(std::uint64_t{});
        else if (dtype == "<u4") call(std::uint32_t{});
        else if (dtype == "<u2") call(std::uint16_t{});
        else if (dtype == "|u1" || dtype == "|b1") call(std::uint8_t{});
        else throw std::invalid_argument("an array of dtype " + dtype + " cannot be read");
    }
};

// Arrays by name: what a model gets and gives.
using Arrays = std::map<std::string, Array>;
// A model that is loaded: from its inputs to its outputs, by the names that they have in the file.
using Model = std::function<Arrays(const Arrays&)>;
// Loads a model from the bytes of an ONNX file; it throws where it cannot.
using LoadModel = std::function<Model(const std::string&)>;

// Observations or actions: one array, or arrays by name (a Dict space) or in order (a Tuple space), in each other.
struct Tree {
    enum class Kind { array, dict, tuple };

    Kind kind = Kind::array;
    Array leaf;
    std::vector<std::string> names;
    std::vector<Tree> parts;

    Tree() = default;
    Tree(Array array) : leaf(std::move(array)) {}
    Tree(const std::map<std::string, Array>& arrays) : kind(Kind::dict) {
        for (const auto& [name, array] : arrays) {
            names.push_back(name);
            parts.emplace_back(array);
        }
    }
    static Tree dict(const std::map<std::string, Tree>& trees) {
        Tree found;
        found.kind = Kind::dict;
        for (const auto& [name, tree] : trees) {
            found.names.push_back(name);
            found.parts.push_back(tree);
        }
        return found;
    }
    static Tree tuple(std::vector<Tree> trees) {
        Tree found;
        found.kind = Kind::tuple;
        found.parts = std::move(trees);
        return found;
    }

    // Returns the only array.
    const Array& array() const {
        if (kind != Kind::array) throw std::invalid_argument("there are several arrays: name one");
        return leaf;
    }
    const Tree& operator[](const std::string& name) const {
        for (std::size_t i = 0; i < names.size(); ++i) {
            if (names[i] == name) return parts[i];
        }
        throw std::out_of_range("there is no array " + name);
    }
    const Tree& operator[](std::size_t index) const {
        if (kind != Kind::tuple) throw std::invalid_argument("this is no tuple of arrays");
        return parts.at(index);
    }
};

// What a client reports: K entries in the order of time, of which an env may have several. What is empty is left out.
struct Entries {
    std::vector<int> envs;        // number of the env of each entry
    Tree obs;                     // observations [K, ...]
    std::vector<double> rewards;  // reward of the action before
    std::vector<bool> begins;     // whether an episode begins with the observation
    std::vector<bool> terminated;  // whether the episode ended with it; then it gets no action
    std::vector<bool> truncated;   // whether the episode was cut off with it
    std::optional<Tree> actions;   // actions [K, ...] that the client takes itself; then none is returned
    std::vector<Value> infos;      // a map for each entry, which callbacks can read
};

struct Options {
    std::string token;        // what the server asks for, if it asks for a token
    std::string name;         // name of this client in messages of the server
    double retry_s = 60.0;    // seconds for which the client tries to reach a server that does not answer
    double timeout_s = 600.0;  // seconds that the server may take for an answer, in which it may also train
    LoadModel load_model;      // loads the policies that the server sends; with it, the client chooses the actions itself
    int steps_per_message = 32;  // steps of each env that such a client sends at once; fewer where they take `MAX_DELAY_S`
    std::optional<std::uint64_t> seed;  // seed of the actions of such a client; without one, it is random
};

namespace detail {

// The connection broke; the client connects again.
struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline const std::string DTYPES[] = {"<f4", "<f8", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1"};

inline std::string reason(int number) { return std::strerror(number); }

inline void pack(Packer& packer, const Tree& tree, int depth = 0) {
    if (depth > MAX_DEPTH - 4) throw std::invalid_argument("arrays are nested too deep to be sent");
    if (tree.kind == Tree::Kind::array) {
        packer.map(3);
        packer.text("dtype");
        packer.text(tree.leaf.dtype);
        packer.text("shape");
        packer.list(tree.leaf.shape.size());
        for (const std::size_t length : tree.leaf.shape) packer.unsigned_integer(length);
        packer.text("data");
        packer.blob(tree.leaf.bytes.data(), tree.leaf.bytes.size());
        return;
    }
    tree.kind == Tree::Kind::dict ? packer.map(tree.parts.size()) : packer.list(tree.parts.size());
    for (std::size_t i = 0; i < tree.parts.size(); ++i) {
        if (tree.kind == Tree::Kind::dict) packer.text(tree.names[i]);
        pack(packer, tree.parts[i], depth + 1);
    }
}

inline Tree unpack(const Value& value) {
    Tree found;
    if (value.kind == Value::Kind::list) {
        found.kind = Tree::Kind::tuple;
    } else if (value.kind != Value::Kind::map) {
        damaged("an array is no map");
    } else if (value.parts.size() == 3 && value.find("dtype") && value.find("shape") && value.find("data")) {
        found.leaf.dtype = field(value, "dtype", Value::Kind::text).text;
        std::size_t count = 1;
        for (const Value& length : field(value, "shape", Value::Kind::list).parts) {
            if (length.kind != Value::Kind::integer || length.integer < 0 || length.integer > (1 << 27))
                damaged("the shape of an array is wrong");
            found.leaf.shape.push_back(static_cast<std::size_t>(length.integer));
            count *= found.leaf.shape.back();
            if (count > MAX_MESSAGE_BYTES) damaged("the shape of an array is wrong");
        }
        found.leaf.bytes = field(value, "data", Value::Kind::bytes).text;
        const auto& known = DTYPES;
        if (std::find(std::begin(known), std::end(known), found.leaf.dtype) == std::end(known))
            damaged("the dtype of an array is unknown");
        if (found.leaf.bytes.size() != count * static_cast<std::size_t>(found.leaf.dtype[2] - '0'))
            damaged("an array has not the bytes of its shape");
        return found;
    } else {
        found.kind = Tree::Kind::dict;
        found.names = value.names;
    }
    for (const Value& part : value.parts) found.parts.push_back(unpack(part));
    return found;
}

// An entry of several: which row of the observations, and whether it is the first one of the next episode.
struct Row {
    std::size_t index;
    bool is_next;
};

inline Tree take(const std::vector<Row>& rows, const Tree& now, const Tree& next) {
    if (now.kind != next.kind || now.names != next.names || now.parts.size() != next.parts.size())
        throw std::invalid_argument("obs and next_obs have different arrays");
    Tree found;
    found.kind = now.kind;
    found.names = now.names;
    if (now.kind != Tree::Kind::array) {
        for (std::size_t i = 0; i < now.parts.size(); ++i)
            found.parts.push_back(take(rows, now.parts[i], next.parts[i]));
        return found;
    }
    if (now.leaf.dtype != next.leaf.dtype || now.leaf.shape != next.leaf.shape ||
        now.leaf.bytes.size() != next.leaf.bytes.size())
        throw std::invalid_argument("obs and next_obs have different shapes or types");
    found.leaf.dtype = now.leaf.dtype;
    found.leaf.shape = now.leaf.shape;
    const std::size_t count = now.leaf.num_entries(), num_bytes = count ? now.leaf.bytes.size() / count : 0;
    found.leaf.shape[0] = rows.size();
    for (const Row& row : rows) {
        if (row.index >= count) throw std::invalid_argument("obs has fewer entries than envs");
        found.leaf.bytes.append((row.is_next ? next : now).leaf.bytes, row.index * num_bytes, num_bytes);
    }
    return found;
}

// Appends the rows of another tree.
inline void append(Tree& tree, const Tree& more) {
    if (tree.kind != more.kind || tree.names != more.names || tree.parts.size() != more.parts.size())
        throw std::invalid_argument("obs has other arrays than in the call before");
    for (std::size_t i = 0; i < tree.parts.size(); ++i) append(tree.parts[i], more.parts[i]);
    if (tree.kind != Tree::Kind::array) return;
    std::vector<std::size_t> shape = more.leaf.shape;
    if (shape.size() == tree.leaf.shape.size() && !shape.empty()) shape[0] = tree.leaf.shape[0];
    if (tree.leaf.dtype != more.leaf.dtype || tree.leaf.shape != shape)
        throw std::invalid_argument("obs has another shape or dtype than in the call before");
    tree.leaf.shape[0] += more.leaf.shape[0];
    tree.leaf.bytes += more.leaf.bytes;
}

// Returns the parts of a Dict or Tuple space by their names, and none of another space.
inline std::vector<std::pair<std::string, const Value*>> parts_of(const Value& space) {
    std::vector<std::pair<std::string, const Value*>> found;
    const std::string& type = field(space, "type", Value::Kind::text).text;
    if (type != "Dict" && type != "Tuple") return found;
    for (const Value& part : field(space, "spaces", Value::Kind::list).parts) {
        if (type == "Tuple") {
            found.emplace_back(std::to_string(found.size()), &part);
        } else {
            if (part.parts.size() != 2) damaged("a part of a Dict space is no pair");
            found.emplace_back(part.parts[0].text, &part.parts[1]);
        }
    }
    return found;
}

// Returns the dtype that a model gets: float32 for floats, and the dtype of the space, such as "int64", for other numbers.
inline std::string dtype_of(const Value& space) {
    if (space.find("dtype") == nullptr) return "|i1";  // of a MultiBinary space
    const std::string& name = field(space, "dtype", Value::Kind::text).text;
    if (name[0] == 'f') return "<f4";
    const std::size_t digits = name.find_first_of("123456789");
    const int num_bytes = digits == std::string::npos ? 1 : std::stoi(name.substr(digits)) / 8;
    return (num_bytes == 1 ? "|" : "<") + name.substr(0, 1) + std::to_string(num_bytes);
}

// Adds rows of the observations [K, ...] to the inputs of a model.
inline void add_inputs(Arrays& inputs, const std::string& name, const Value& space, const Tree& obs, std::size_t count,
                       const std::vector<Row>& rows) {
    const auto parts = parts_of(space);
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto& [key, part] = parts[i];
        add_inputs(inputs, name + "/" + key, *part, obs.kind == Tree::Kind::tuple ? obs[i] : obs[key], count, rows);
    }
    if (!parts.empty()) return;
    if (obs.array().num_entries() != count) throw std::invalid_argument(name + " has more or fewer entries than envs");
    inputs[name] = take(rows, obs, obs).leaf.to(dtype_of(space));
}

// Returns an output of a model, which has so many rows.
inline const Array& output_of(const Arrays& outputs, const std::string& name, std::size_t num_rows) {
    const auto found = outputs.find(name);
    if (found == outputs.end() || found->second.num_entries() != num_rows)
        throw std::invalid_argument("the model of load_model did not return " + std::to_string(num_rows) + " rows of '" +
                                    name + "': it must return all outputs of the file by their names");
    return found->second;
}

// Returns the actions [M, ...] among the outputs of a model.
inline Tree actions_of(const Arrays& outputs, const std::string& name, const Value& space, std::size_t num_rows) {
    const auto parts = parts_of(space);
    if (parts.empty()) return output_of(outputs, name, num_rows);
    Tree found;
    found.kind = space.find("type")->text == "Dict" ? Tree::Kind::dict : Tree::Kind::tuple;
    for (const auto& [key, part] : parts) {
        if (found.kind == Tree::Kind::dict) found.names.push_back(key);
        found.parts.push_back(actions_of(outputs, name + "/" + key, *part, num_rows));
    }
    return found;
}

// Entries whose actions the client chose itself, and what the policy gave with the actions.
struct Acted {
    Entries entries;
    Array outputs, draws;  // [K, D], zeros where an episode ended
    std::int64_t weights_version = 0;
};

// Chooses the actions by the policy that the server sends, and keeps the steps until they are sent.
class LocalActor {
   public:
    LocalActor(LoadModel load_model, int steps_per_message, std::optional<std::uint64_t> seed)
        : load_model_(std::move(load_model)), steps_per_message_(steps_per_message) {
        if (steps_per_message < 1)
            throw std::invalid_argument("steps_per_message must be at least 1, got " + std::to_string(steps_per_message));
        std::random_device device;
        random_.seed(seed ? *seed : std::uint64_t{device()} << 32 | device());
    }

    bool has_policy() const { return static_cast<bool>(model_); }
    std::int64_t weights_version() const { return weights_version_; }

    // Acts by another policy from now on.
    void set_policy(const Value& message) {
        const std::string& file = field(message, "model", Value::Kind::bytes).text;
        const std::int64_t width = field(message, "num_uniform", Value::Kind::integer).integer;
        if (width < 0 || width > (1 << 20)) damaged("num_uniform is wrong");
        num_uniform_ = static_cast<std::size_t>(width);
        weights_version_ = field(message, "weights_version", Value::Kind::integer).integer;
        std::string problem = "it returned no model";
        try {
            model_ = load_model_(file);
        } catch (const std::exception& error) {
            model_ = nullptr;
            problem = error.what();
        }
        if (!model_)
            throw ClientError("model", "load_model cannot load the policy with weights version " +
                                           std::to_string(weights_version_) + ", an ONNX file of " +
                                           std::to_string(file.size()) + " bytes: " + problem +
                                           ". Use a newer ONNX runtime, or leave load_model out, so that the server "
                                           "chooses the actions.");
    }

    // Forgets the policy, and the steps that were not sent; they belong to episodes that are lost.
    void forget() {
        model_ = nullptr;
        take_kept();
    }

    // Keeps entries, and returns the actions of those that did not end.
    Tree act(const Value& observation_space, const Value& action_space, const Entries& entries) {
        const std::size_t count = entries.envs.size();
        std::vector<Row> rows;
        for (std::size_t i = 0; i < count; ++i) {
            const bool is_over = (!entries.terminated.empty() && entries.terminated[i]) ||
                                 (!entries.truncated.empty() && entries.truncated[i]);
            if (!is_over) rows.push_back({i, false});
        }
        Arrays inputs;
        add_inputs(inputs, "obs", observation_space, entries.obs, count, rows);
        std::vector<float> uniform(rows.size() * num_uniform_);
        for (float& number : uniform) number = static_cast<float>(random_() >> 40) * 0x1p-24f;  // from 0 to 1, without 1
        inputs["uniform"] = Array::of(uniform, {rows.size(), num_uniform_});
        const Arrays outputs = model_(inputs);
        Tree actions = actions_of(outputs, "actions", action_space, rows.size());
        keep(entries, rows, output_of(outputs, "outputs", rows.size()), output_of(outputs, "draws", rows.size()));
        return actions;
    }

    // Returns whether the steps that were kept should be sent now.
    bool is_full(int num_envs) const {
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - since_;
        return kept_.entries.envs.size() >= static_cast<std::size_t>(steps_per_message_) * static_cast<std::size_t>(num_envs) ||
               waited.count() > MAX_DELAY_S;
    }

    // Returns the steps that were kept, and keeps them no longer.
    Acted take_kept() {
        since_ = std::chrono::steady_clock::now();
        kept_.weights_version = weights_version_;
        std::vector<Value>& infos = kept_.entries.infos;
        if (std::all_of(infos.begin(), infos.end(), [](const Value& info) { return info.names.empty(); })) infos.clear();
        return std::exchange(kept_, {});
    }

   private:
    LoadModel load_model_;
    int steps_per_message_;
    std::mt19937_64 random_;
    Model model_;
    std::size_t num_uniform_ = 0;
    std::int64_t weights_version_ = 0;
    Acted kept_;
    std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();

    void keep(const Entries& entries, const std::vector<Row>& rows, const Array& outputs, const Array& draws) {
        const std::size_t count = entries.envs.size();
        Entries& kept = kept_.entries;
        const bool is_first = kept.envs.empty();
        if (is_first) kept.obs = entries.obs;
        else append(kept.obs, entries.obs);
        add(kept_.outputs, outputs, count, rows, is_first);
        add(kept_.draws, draws, count, rows, is_first);
        add(kept.envs, entries.envs, count, 0);
        add(kept.rewards, entries.rewards, count, 0.0);
        add(kept.begins, entries.begins, count, false);
        add(kept.terminated, entries.terminated, count, false);
        add(kept.truncated, entries.truncated, count, false);
        add(kept.infos, entries.infos, count, Value(std::map<std::string, Value>{}));
    }

    template <typename T, typename Default>
    static void add(std::vector<T>& kept, const std::vector<T>& given, std::size_t count, const Default& otherwise) {
        if (given.empty()) kept.insert(kept.end(), count, T(otherwise));
        else kept.insert(kept.end(), given.begin(), given.end());
    }

    // Adds rows [M, D] at M of K places, and zeros at the others.
    static void add(Array& kept, const Array& given, std::size_t count, const std::vector<Row>& rows, bool is_first) {
        if (given.shape.size() != 2 || given.dtype != "<f4" || given.bytes.size() != given.size() * sizeof(float))
            throw std::invalid_argument("the model of load_model must return 'outputs' and 'draws' as float32 [M, D]");
        const std::size_t num_bytes = given.shape[1] * sizeof(float);
        std::string added(count * num_bytes, '\0');
        for (std::size_t i = 0; i < rows.size(); ++i)
            added.replace(rows[i].index * num_bytes, num_bytes, given.bytes, i * num_bytes, num_bytes);
        if (is_first) kept = Array{given.dtype, {0, given.shape[1]}, {}};
        kept.shape[0] += count;
        kept.bytes += added;
    }
};

}  // namespace detail

// A connection to a policy server, over which the episodes of one or more envs are played.
//
// Where the connection breaks, the client connects again, and its episodes continue. It throws `EpisodesLost` if the
// server does not know them any more, `ServerStopped` when the training is over, `ClientError` where the server refuses
// a message, and `std::invalid_argument` for arguments that cannot be sent.
class PolicyClient {
   public:
    // Connects to `"host:port"` or `"unix:/path/of/the/socket"`, for so many envs.
    explicit PolicyClient(std::string address, int num_envs = 1, Options options = {})
        : address_(std::move(address)), num_envs_(num_envs), options_(std::move(options)) {
        if (options_.load_model) local_.emplace(options_.load_model, options_.steps_per_message, options_.seed);
        connect();
    }
    PolicyClient(const PolicyClient&) = delete;
    PolicyClient& operator=(const PolicyClient&) = delete;
    // Leaves; a client that acts itself does not send the steps that it kept, which may take a while: call `close` for that.
    ~PolicyClient() {
        if (local_) local_->forget();
        close();
    }

    // Begins an episode in some envs, and returns their first actions [K, ...].
    Tree begin(const Tree& obs, const std::vector<int>& envs) {
        Entries entries;
        entries.envs = envs;
        entries.obs = obs;
        entries.begins.assign(envs.size(), true);
        return exchange(entries);
    }
    Tree begin(const Tree& obs) { return begin(obs, all_envs()); }

    // Reports what the latest actions led to, and returns the next actions of the envs whose episodes continue.
    //
    // Where an episode ended, `obs` holds its last observation, and `begin` begins the next one.
    Tree step(const std::vector<int>& envs, const Tree& obs, const std::vector<double>& rewards,
              const std::vector<bool>& terminated = {}, const std::vector<bool>& truncated = {}) {
        Entries entries;
        entries.envs = envs;
        entries.obs = obs;
        entries.rewards = rewards;
        entries.terminated = terminated;
        entries.truncated = truncated;
        return exchange(entries);
    }
    Tree step(const Tree& obs, const std::vector<double>& rewards, const std::vector<bool>& terminated = {},
              const std::vector<bool>& truncated = {}) {
        return step(all_envs(), obs, rewards, terminated, truncated);
    }

    // Does the same, and begins the next episode where one ended, with its observation in `next_obs` [K, ...].
    //
    // Returns the actions [K, ...] of all of these envs.
    Tree step(const std::vector<int>& envs, const Tree& obs, const std::vector<double>& rewards,
              const std::vector<bool>& terminated, const std::vector<bool>& truncated, const Tree& next_obs) {
        const std::size_t count = envs.size();
        check_count("rewards", rewards.size(), count);
        check_count("terminated", terminated.size(), count);
        check_count("truncated", truncated.size(), count);
        std::vector<detail::Row> rows;
        Entries entries;
        for (std::size_t i = 0; i < count; ++i) {
            const bool is_over = flag(terminated, i) || flag(truncated, i);
            for (const bool is_next : {false, true}) {
                if (is_next && !is_over) continue;
                rows.push_back({i, is_next});
                entries.envs.push_back(envs[i]);
                entries.rewards.push_back(is_next || rewards.empty() ? 0.0 : rewards[i]);
                entries.begins.push_back(is_next);
                entries.terminated.push_back(!is_next && flag(terminated, i));
                entries.truncated.push_back(!is_next && flag(truncated, i));
            }
        }
        entries.obs = rows.size() == count ? obs : detail::take(rows, obs, next_obs);
        return exchange(entries);
    }
    Tree step(const Tree& obs, const std::vector<double>& rewards, const std::vector<bool>& terminated,
              const std::vector<bool>& truncated, const Tree& next_obs) {
        return step(all_envs(), obs, rewards, terminated, truncated, next_obs);
    }

    // Sends one message `steps`, and returns the actions [M, ...] of the entries that want one, in their order.
    Tree exchange(const Entries& entries) {
        const std::size_t count = entries.envs.size();
        check_count("rewards", entries.rewards.size(), count);
        check_count("begins", entries.begins.size(), count);
        check_count("terminated", entries.terminated.size(), count);
        check_count("truncated", entries.truncated.size(), count);
        check_count("infos", entries.infos.size(), count);
        if (local_ && !entries.actions) {
            while (!local_->has_policy()) request_ping();
            Tree actions = local_->act(observation_space_, action_space_, entries);
            if (local_->is_full(num_envs_)) flush();
            return actions;
        }
        flush();
        const Value answer = send(entries, nullptr);
        try {
            const Value* actions = answer.find("actions");
            if (actions == nullptr) detail::damaged("it has no actions");
            return detail::unpack(*actions);
        } catch (const ClientError&) {
            disconnect();
            throw;
        }
    }

    // Gives up the unfinished episodes of some envs, of which the server keeps the complete steps.
    void drop(const std::vector<int>& envs) {
        flush();
        detail::Packer packer;
        packer.map(3);
        packer.text("type");
        packer.text("drop");
        pack_id(packer);
        pack_envs(packer, envs);
        request(packer.bytes, "done");
    }
    void drop() { drop(all_envs()); }

    // Tells the server that this client is there, where the simulator needs longer than the server waits.
    void ping() {
        flush();
        request_ping();
    }

    // Ends the session; the server drops episodes that are not over.
    void close() noexcept {
        if (socket_ >= 0) {
            try {
                if (local_) {
                    options_.retry_s = 0;
                    flush();
                }
                detail::Packer packer;
                packer.map(1);
                packer.text("type");
                packer.text("bye");
                if (socket_ >= 0) send_frame(packer.bytes);
            } catch (const std::exception&) {  // the server is gone
            }
            disconnect();
        }
        session_.clear();
    }

    // Version of the weights that chose the latest actions.
    std::int64_t weights_version() const { return local_ ? local_->weights_version() : weights_version_; }
    // Descriptions of one observation and one action, as the server sent them.
    const Value& observation_space() const { return observation_space_; }
    const Value& action_space() const { return action_space_; }
    int num_envs() const { return num_envs_; }

   private:
    using Clock = std::chrono::steady_clock;

    std::string address_;
    int num_envs_;
    Options options_;
    std::optional<detail::LocalActor> local_;
    std::string session_;
    int socket_ = -1;
    std::int64_t next_id_ = 1, id_ = 0;
    std::size_t max_bytes_ = MAX_MESSAGE_BYTES;
    std::int64_t weights_version_ = 0;
    Value observation_space_, action_space_;

    // Sends the steps that a client which acts itself has kept; with the answer may come another policy. So every message
    // comes after it, and the steps of a message have the weights of one version.
    void flush() {
        if (!local_) return;
        const detail::Acted acted = local_->take_kept();
        if (!acted.entries.envs.empty()) send(acted.entries, &acted);
    }

    void request_ping() {
        detail::Packer packer;
        packer.map(2);
        packer.text("type");
        packer.text("ping");
        pack_id(packer);
        request(packer.bytes, "done");
    }

    // Sends one message `steps`, and returns the answer.
    Value send(const Entries& entries, const detail::Acted* acted) {
        const std::size_t count = entries.envs.size();
        const std::pair<const char*, const std::vector<bool>*> flags[] = {
            {"begins", &entries.begins}, {"terminated", &entries.terminated}, {"truncated", &entries.truncated}};
        std::size_t num_fields = 4 + !entries.rewards.empty() + entries.actions.has_value() + !entries.infos.empty();
        for (const auto& [name, values] : flags) num_fields += any(*values);
        if (acted != nullptr) num_fields += 3;
        detail::Packer packer;
        packer.map(num_fields);
        packer.text("type");
        packer.text("steps");
        pack_id(packer);
        pack_envs(packer, entries.envs);
        packer.text("obs");
        detail::pack(packer, entries.obs);
        if (!entries.rewards.empty()) {
            packer.text("rewards");
            packer.list(count);
            for (const double reward : entries.rewards) packer.number(reward);
        }
        for (const auto& [name, values] : flags) {
            if (!any(*values)) continue;
            packer.text(name);
            packer.list(count);
            for (const bool value : *values) packer.boolean(value);
        }
        if (entries.actions) {
            packer.text("actions");
            detail::pack(packer, *entries.actions);
        }
        if (!entries.infos.empty()) {
            packer.text("infos");
            packer.list(count);
            for (const Value& info : entries.infos) packer.value(info);
        }
        if (acted != nullptr) {
            packer.text("outputs");
            detail::pack(packer, acted->outputs);
            packer.text("draws");
            detail::pack(packer, acted->draws);
            packer.text("weights_version");
            packer.integer(acted->weights_version);
        }
        return request(packer.bytes, "actions");
    }

    std::vector<int> all_envs() const {
        std::vector<int> envs(static_cast<std::size_t>(num_envs_));
        for (int i = 0; i < num_envs_; ++i) envs[static_cast<std::size_t>(i)] = i;
        return envs;
    }

    static bool flag(const std::vector<bool>& flags, std::size_t index) { return !flags.empty() && flags[index]; }
    static bool any(const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); }
    static void check_count(const char* name, std::size_t size, std::size_t count) {
        if (size != 0 && size != count)
            throw std::invalid_argument(std::string(name) + " has more or fewer entries than envs");
    }

    void pack_id(detail::Packer& packer) {
        id_ = next_id_++;
        packer.text("id");
        packer.integer(id_);
    }

    static void pack_envs(detail::Packer& packer, const std::vector<int>& envs) {
        packer.text("envs");
        packer.list(envs.size());
        for (const int env : envs) packer.integer(env);
    }

    static Clock::time_point after(double seconds) {
        return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    }

    static double seconds(Clock::duration duration) {
        return std::chrono::duration<double>(duration).count();
    }

    // Sends a message, again where the connection broke in between, and returns the answer.
    Value request(const std::string& body, const char* type) {
        if (body.size() + 4 > max_bytes_)
            throw ClientError("too_large", "a message of " + std::to_string(body.size()) + " bytes: the server takes " +
                                               std::to_string(max_bytes_) + ".");
        const auto began = Clock::now();
        auto broke = Clock::time_point::min();
        for (;;) {
            const auto tried = Clock::now();
            try {
                if (socket_ < 0) connect();
                send_frame(body);
                for (;;) {
                    Value answer = receive();
                    if (local_ && answer.find("type")->text == "policy") local_->set_policy(answer);
                    const Value* id = answer.find("id");
                    // Another answer was sent again after a broken connection.
                    if (id == nullptr || id->kind != Value::Kind::integer || id->integer != id_) continue;
                    if (detail::field(answer, "type", Value::Kind::text).text != type)
                        detail::damaged("it is no answer to what was sent");
                    weights_version_ = detail::field(answer, "weights_version", Value::Kind::integer).integer;
                    return answer;
                }
            } catch (const detail::Broken& broken) {
                disconnect();
                const auto now = Clock::now();
                // It held, or broke for the first time.
                if (seconds(now - tried) > options_.retry_s || broke < began) broke = now;
                if (seconds(now - broke) > options_.retry_s || seconds(now - began) > options_.timeout_s)
                    throw ServerStopped("stopped", "the server at " + address_ + " does not answer: " + broken.what());
            } catch (const ClientError&) {
                disconnect();
                throw;
            }
        }
    }

    // Returns the next message of the server; its errors are thrown.
    Value receive() {
        const std::string head = read(4);
        std::size_t size = 0;
        for (const char byte : head) size = size << 8 | static_cast<std::uint8_t>(byte);
        if (size > MAX_MESSAGE_BYTES)
            throw ClientError("too_large", "the server sent a message of " + std::to_string(size) + " bytes");
        const std::string body = read(size);
        Value message = detail::Unpacker(body).read_all();
        const std::string& type = detail::field(message, "type", Value::Kind::text).text;
        if (type == "error")
            throw ClientError(detail::field(message, "code", Value::Kind::text).text,
                              detail::field(message, "message", Value::Kind::text).text);
        if (type == "bye") {
            const Value* text = message.find("message");
            throw ServerStopped("stopped", text != nullptr && text->kind == Value::Kind::text ? text->text
                                                                                              : "the training is over");
        }
        return message;
    }

    std::string read(std::size_t size) {
        std::string found;
        char part[65536];
        while (found.size() < size) {
            const ssize_t count = ::recv(socket_, part, std::min(size - found.size(), sizeof part), 0);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) throw detail::Broken(detail::reason(errno));
            if (count == 0) throw detail::Broken("the server closed the connection");
            found.append(part, static_cast<std::size_t>(count));
        }
        return found;
    }

    void send_frame(const std::string& body) {
        std::string frame;
        frame.reserve(body.size() + 4);
        for (int shift = 24; shift >= 0; shift -= 8) frame.push_back(static_cast<char>(body.size() >> shift));
        frame += body;
#ifdef MSG_NOSIGNAL
        constexpr int flags = MSG_NOSIGNAL;
#else
        constexpr int flags = 0;
#endif
        for (std::size_t sent = 0; sent < frame.size();) {
            const ssize_t count = ::send(socket_, frame.data() + sent, frame.size() - sent, flags);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) throw detail::Broken(detail::reason(errno));
            sent += static_cast<std::size_t>(count);
        }
    }

    // Connects, and says hello, until the server answers or `retry_s` is over.
    void connect() {
        const auto gives_up = after(options_.retry_s);
        double pause_s = 0.05;
        const std::string said = session_;
        Value welcome;
        for (;;) {
            try {
                open();
                send_frame(hello(said));
                welcome = receive();
                break;
            } catch (const detail::Broken& broken) {
                disconnect();
                if (Clock::now() > gives_up)
                    throw ServerStopped("stopped", "no server answers at " + address_ + ": " + broken.what());
            } catch (const ClientError& error) {
                disconnect();
                if (error.code() != "busy" || Clock::now() > gives_up) throw;
            } catch (...) {
                disconnect();
                throw;
            }
            std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
            pause_s = std::min(2 * pause_s, 1.0);
        }
        const auto kind = Value::Kind::integer;
        session_ = detail::field(welcome, "session", Value::Kind::text).text;
        max_bytes_ = static_cast<std::size_t>(detail::field(welcome, "max_message_bytes", kind).integer);
        weights_version_ = detail::field(welcome, "weights_version", kind).integer;
        observation_space_ = detail::field(welcome, "observation_space", Value::Kind::map);
        action_space_ = detail::field(welcome, "action_space", Value::Kind::map);
        if (!said.empty() && !detail::field(welcome, "resumed", Value::Kind::boolean).boolean) {
            if (local_) local_->forget();  // the policy, too, may be another server's
            throw EpisodesLost("lost", "the server at " + address_ + " does not know the episodes of this client.");
        }
    }

    std::string hello(const std::string& session) const {
        detail::Packer packer;
        packer.map(4u + !options_.token.empty() + !session.empty() + local_.has_value());
        packer.text("type");
        packer.text("hello");
        packer.text("protocol");
        packer.integer(PROTOCOL);
        packer.text("num_envs");
        packer.integer(num_envs_);
        packer.text("name");
        packer.text(options_.name);
        if (!options_.token.empty()) {
            packer.text("token");
            packer.text(options_.token);
        }
        if (!session.empty()) {
            packer.text("session");
            packer.text(session);
        }
        if (local_) {
            packer.text("wants_policy");
            packer.boolean(true);
        }
        return packer.bytes;
    }

    void open() {
        if (address_.rfind("unix:", 0) == 0) {
            sockaddr_un target{};
            target.sun_family = AF_UNIX;
            const std::string path = address_.substr(5);
            if (path.empty() || path.size() >= sizeof target.sun_path)
                throw std::invalid_argument("the path of a Unix socket has 1 to " +
                                            std::to_string(sizeof target.sun_path - 1) + " bytes: " + path);
            std::memcpy(target.sun_path, path.c_str(), path.size() + 1);
            if (const int problem = try_open(AF_UNIX, reinterpret_cast<const sockaddr*>(&target), sizeof target))
                throw detail::Broken(detail::reason(problem));
            return;
        }
        const std::size_t colon = address_.rfind(':');
        if (colon == std::string::npos || colon + 1 == address_.size())
            throw std::invalid_argument("an address is host:port or unix:/path, not " + address_);
        std::string host = address_.substr(0, colon);
        if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (const int code = ::getaddrinfo(host.c_str(), address_.c_str() + colon + 1, &hints, &found))
            throw detail::Broken("host " + host + " is not found: " + ::gai_strerror(code));
        int problem = ECONNREFUSED;
        for (const addrinfo* one = found; one != nullptr && problem; one = one->ai_next)
            problem = try_open(one->ai_family, one->ai_addr, one->ai_addrlen);
        ::freeaddrinfo(found);
        if (problem) throw detail::Broken(detail::reason(problem));
        const int on = 1;
        ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }

    // Returns the number of the error, or 0.
    int try_open(int family, const sockaddr* target, socklen_t size) {
#ifdef SOCK_CLOEXEC
        const int found = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
#else
        const int found = ::socket(family, SOCK_STREAM, 0);
#endif
        if (found < 0) return errno;
        timeval timeout{};
        timeout.tv_sec = static_cast<time_t>(options_.timeout_s);
        timeout.tv_usec = static_cast<suseconds_t>((options_.timeout_s - static_cast<double>(timeout.tv_sec)) * 1e6);
        ::setsockopt(found, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
        ::setsockopt(found, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
#ifdef SO_NOSIGPIPE
        const int on = 1;
        ::setsockopt(found, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
        if (::connect(found, target, size) != 0) {
            const int problem = errno;
            ::close(found);
            return problem;
        }
        socket_ = found;
        return 0;
    }

    void disconnect() noexcept {
        if (socket_ >= 0) ::close(socket_);
        socket_ = -1;
    }
};

}  // namespace corral

#endif  // CORRAL_CLIENT_HPP
