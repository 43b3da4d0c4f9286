// Makes calls of a client that acts itself; the test says what must arrive. It prints the actions of each call.
#include "observations.hpp"
#include "remote_loader.hpp"

static void print(const Tree& actions) {
    for (const double number : actions["move"].array().as<double>()) std::cout << number << " ";
    for (const int number : actions["turn"].array().as<int>()) std::cout << number << " ";
    std::cout << "\n";
}

int main(int, char** argv) {
    corral::Options options;
    options.load_model = load_model;
    options.steps_per_message = 2;
    options.seed = std::strtoull(argv[2], nullptr, 10);
    std::cout.precision(9);
    corral::PolicyClient client(argv[1], 3, options);
    print(client.begin(observe(3, 0)));
    print(client.step({2, 0}, observe(2, 3), {1.5, -2.0}));
    print(client.step(observe(3, 5), {1, 2, 3}, {false, true, false}, {false, true, true}));
    print(client.begin(observe(2, 8), {1, 2}));
    print(client.step(observe(3, 10), {4, 5, 6}, {true, false, false}, {false, false, true}, observe(3, 13)));
    client.ping();
    print(client.step(observe(3, 16), {1, 1, 1}, {true, true, true}));  // nobody wants an action
    print(client.begin(observe(3, 19)));
    client.drop({1});
    corral::Entries entries;
    entries.envs = {0, 2};
    entries.obs = observe(2, 0);
    entries.actions = Tree::dict({{"move", Array::of(std::vector<float>{9.0f, 8.0f}, {2, 1})},
                                  {"turn", Array::of(std::vector<std::int64_t>{2, 1})}});
    try {
        client.exchange(entries);
        check(false, "own actions for an on-policy algorithm");
    } catch (const corral::ClientError& error) {
        check(error.code() == "protocol", "the code of an error");
    }
    print(client.begin(observe(3, 0)));  // nobody knows yet that the session is over
    try {
        client.ping();
        check(false, "a session that was ended");
    } catch (const corral::EpisodesLost&) {
    }
    print(client.begin(observe(3, 22)));
    try {
        client.step(Tree::dict({{"image", Array::of(std::vector<std::uint8_t>(4), {1, 2, 2})}}), {1, 1, 1});
        check(false, "observations that do not fit the space");
    } catch (const std::exception&) {
    }
    print(client.step(observe(3, 25), {1, 1, 1}));
    print(client.step(observe(3, 28), {1, 1, 1}));
    client.close();  // which sends the last step
}
