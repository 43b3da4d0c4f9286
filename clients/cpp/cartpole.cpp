// Plays episodes of CartPole with the actions of a policy server, until the training is over.
//
//     g++ -std=c++17 -O2 -o cartpole cartpole.cpp
//     corral serve --config cartpole.yaml --port 5555 &
//     ./cartpole 127.0.0.1:5555
//
// Its arguments are the address, the number of envs (8) and a seed (0). The token, if the server asks for one, is in the
// environment variable CORRAL_TOKEN. The last line that it prints is the number of env steps.
//
// With a header that has the function `load_model`, it chooses the actions itself, by the policy that the server sends:
//
//     g++ -std=c++17 -O2 -DLOADER='"onnxruntime_loader.hpp"' -o cartpole cartpole.cpp -lonnxruntime

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "corral_client.hpp"
#ifdef LOADER
#include LOADER
#endif

// The pole on a cart of Barto, Sutton and Anderson (1983), with the constants of Gymnasium's CartPole-v1.
class CartPole {
   public:
    static constexpr int MAX_STEPS = 500;

    void reset(std::mt19937& random) {
        std::uniform_real_distribution<double> uniform(-0.05, 0.05);
        for (double* part : {&x_, &speed_, &angle_, &turn_}) *part = uniform(random);
        num_steps_ = 0;
    }

    void step(bool to_the_right) {
        constexpr double gravity = 9.8, cart_mass = 1.0, pole_mass = 0.1, half_length = 0.5, tau_s = 0.02;
        constexpr double mass = cart_mass + pole_mass;
        const double force = to_the_right ? 10.0 : -10.0;
        const double cosine = std::cos(angle_), sine = std::sin(angle_);
        const double push = (force + pole_mass * half_length * turn_ * turn_ * sine) / mass;
        const double turn_rate = (gravity * sine - cosine * push) /
                                 (half_length * (4.0 / 3.0 - pole_mass * cosine * cosine / mass));
        const double acceleration = push - pole_mass * half_length * turn_rate * cosine / mass;
        x_ += tau_s * speed_;
        speed_ += tau_s * acceleration;
        angle_ += tau_s * turn_;
        turn_ += tau_s * turn_rate;
        ++num_steps_;
    }

    bool has_fallen() const {
        constexpr double pi = 3.14159265358979323846;
        return std::abs(x_) > 2.4 || std::abs(angle_) > 12 * pi / 180;
    }
    bool is_out_of_time() const { return num_steps_ >= MAX_STEPS; }

    void observe(float* obs) const {
        const double parts[] = {x_, speed_, angle_, turn_};
        for (int i = 0; i < 4; ++i) obs[i] = static_cast<float>(parts[i]);
    }

   private:
    double x_ = 0, speed_ = 0, angle_ = 0, turn_ = 0;
    int num_steps_ = 0;
};

class Envs {
   public:
    Envs(int num_envs, unsigned seed) : envs_(static_cast<std::size_t>(num_envs)), random_(seed) {}

    // Plays until the server has lost the episodes.
    void play(corral::PolicyClient& client, long& num_steps) {
        const std::size_t count = envs_.size();
        for (CartPole& env : envs_) env.reset(random_);
        const std::vector<double> rewards(count, 1.0);
        std::vector<bool> terminated(count), truncated(count);
        std::vector<int> actions = client.begin(observe()).array().as<int>();
        for (;;) {
            for (std::size_t i = 0; i < count; ++i) {
                envs_[i].step(actions.at(i) == 1);
                terminated[i] = envs_[i].has_fallen();
                truncated[i] = envs_[i].is_out_of_time();
            }
            num_steps += static_cast<long>(count);
            const corral::Array obs = observe();
            for (std::size_t i = 0; i < count; ++i) {
                if (terminated[i] || truncated[i]) envs_[i].reset(random_);
            }
            actions = client.step(obs, rewards, terminated, truncated, observe()).array().as<int>();
        }
    }

   private:
    std::vector<CartPole> envs_;
    std::mt19937 random_;

    corral::Array observe() const {
        std::vector<float> obs(4 * envs_.size());
        for (std::size_t i = 0; i < envs_.size(); ++i) envs_[i].observe(&obs[4 * i]);
        return corral::Array::of(obs, {envs_.size(), 4});
    }
};

int main(int argc, char** argv) {
    if (argc < 2) {
        std::cerr << "usage: cartpole ADDRESS [NUM_ENVS [SEED]]\n";
        return 2;
    }
    const int num_envs = argc > 2 ? std::atoi(argv[2]) : 8;
    corral::Options options;
    options.name = "cartpole.cpp";
    if (const char* token = std::getenv("CORRAL_TOKEN")) options.token = token;
    const unsigned seed = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 0u;
#ifdef LOADER
    options.load_model = load_model;
    options.seed = seed;
#endif
    Envs envs(num_envs, seed);
    long num_steps = 0;
    int status = 0;
    try {
        corral::PolicyClient client(argv[1], num_envs, options);
        for (;;) {
            try {
                envs.play(client, num_steps);
            } catch (const corral::EpisodesLost& lost) {
                std::cerr << lost.what() << " All envs begin new episodes.\n";
            }
        }
    } catch (const corral::ServerStopped& stopped) {
        std::cerr << stopped.what() << "\n";
    } catch (const corral::ClientError& error) {
        std::cerr << "error " << error.code() << ": " << error.what() << "\n";
        status = 1;
    }
    std::cout << num_steps << std::endl;
    return status;
}
