"""The policy server: simulators in other programs ask for actions over a socket, and their steps train the policy."""
