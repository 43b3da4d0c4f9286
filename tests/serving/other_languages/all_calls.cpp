// Makes each call of the client once; the test says what must arrive, and answers.
#include "observations.hpp"

int main(int, char** argv) {
    corral::Options options;
    options.name = "all calls";
    options.token = "a token";
    corral::PolicyClient client(argv[1], 3, options);
    check(client.observation_space().find("type")->text == "Dict", "observation_space");
    Tree actions = client.begin(observe(3, 0));
    check(actions["move"].array().as<float>() == std::vector<float>({0.5f, 1.5f, 2.5f}), "actions of begin");
    check(actions["move"].array().row<double>(1) == std::vector<double>({1.5}), "one row");
    check(actions["turn"].array().as<int>() == std::vector<int>({0, 1, 2}), "numbers of 64 bits");
    check(client.weights_version() == 7, "weights_version");
    actions = client.step({2, 0}, observe(2, 3), {1.5, -2.0});
    check(actions["turn"].array().as<int>() == std::vector<int>({2, 0}), "actions of some envs");
    actions = client.step(observe(3, 5), {1, 2, 3}, {false, true, false}, {false, true, true});
    check(actions["turn"].array().as<int>() == std::vector<int>({0}), "actions of the rest");
    actions = client.begin(observe(2, 8), {1, 2});
    actions = client.step(observe(3, 10), {4, 5, 6}, {true, false, false}, {false, false, true}, observe(3, 13));
    check(actions["turn"].array().as<int>() == std::vector<int>({0, 1, 2}), "actions with next observations");
    corral::Entries entries;
    entries.envs = {0, 1};
    entries.obs = observe(2, 16);
    entries.actions = Tree::dict({{"move", Array::of(std::vector<float>{9.0f, 8.0f}, {2, 1})},
                                  {"turn", Array::of(std::vector<std::int64_t>{2, 1})}});
    entries.infos = {std::map<std::string, corral::Value>{{"note", "é"}, {"level", 3}, {"big", std::int64_t{-5000000000}}},
                     std::map<std::string, corral::Value>{{"list", std::vector<corral::Value>{true, 0.5, corral::Value()}}}};
    check(client.exchange(entries)["turn"].array().num_entries() == 0, "own actions");
    client.ping();
    client.drop({1});
    try {
        client.step({0, 1}, observe(2, 18), {1.0, 1.0});
        check(false, "an env without an episode");
    } catch (const corral::ClientError& error) {
        check(error.code() == "protocol", "the code of an error");
    }
    try {
        client.begin(observe(3, 0));
        check(false, "a session that was ended");
    } catch (const corral::EpisodesLost&) {
    }
    client.begin(observe(3, 0));
    try {
        client.step(observe(2, 0), {1.0, 1.0});
        check(false, "lengths that differ");
    } catch (const std::invalid_argument&) {
    }
    client.step(observe(3, 3), {1.0, 1.0, 1.0});
    client.close();
}
