// Makes calls of a client that acts itself; the test says what must arrive. It prints the actions of each call.
import assert from "node:assert/strict";

import { ClientError, EpisodesLost, NdArray, PolicyClient } from "../../../clients/javascript/corral_client.mjs";
import { loadModel } from "./remote_loader.mjs";

function observe(count, first) {
  const numbers = Array.from({ length: count }, (_, index) => first + index);
  return {
    image: new NdArray(Uint8Array.from(numbers.flatMap((i) => [0, 1, 2, 3].map((k) => 10 * i + k))), [count, 2, 2]),
    pair: [
      new NdArray(Float64Array.from(numbers, (i) => i + 0.25), [count, 1]),
      new NdArray(BigInt64Array.from(numbers, (i) => BigInt(i % 5)), [count]),
    ],
  };
}

function print({ move, turn }) {
  console.log([...move.numbers(), ...turn.numbers()].join(" "));
}

const [address, seed] = process.argv.slice(2);
const client = await PolicyClient.connect(address, { numEnvs: 3, loadModel, stepsPerMessage: 2, seed: Number(seed) });
print(await client.begin(observe(3, 0)));
const obs = observe(2, 3);
print(await client.step(obs, [1.5, -2], { envs: [2, 0] }));
obs.pair[0].data.fill(0); // a simulator may use its arrays again
print(await client.step(observe(3, 5), [1, 2, 3], { terminated: [false, true, false], truncated: [false, true, true] }));
print(await client.begin(observe(2, 8), [1, 2]));
const ends = { terminated: [true, false, false], truncated: [false, false, true], nextObs: observe(3, 13) };
print(await client.step(observe(3, 10), [4, 5, 6], ends));
await client.ping();
print(await client.step(observe(3, 16), [1, 1, 1], { terminated: [true, true, true] })); // nobody wants an action
print(await client.begin(observe(3, 19)));
await client.drop([1]);
const own = { move: new NdArray(Float32Array.of(9, 8), [2, 1]), turn: new NdArray(BigInt64Array.of(2n, 1n), [2]) };
await assert.rejects(
  client.exchange({ envs: [0, 2], obs: observe(2, 0), actions: own }),
  (error) => error instanceof ClientError && error.code === "protocol",
);
print(await client.begin(observe(3, 0))); // nobody knows yet that the session is over
await assert.rejects(client.ping(), EpisodesLost);
const first = client.begin(observe(3, 22));
await assert.rejects(client.ping(), TypeError); // one call at a time
print(await first);
await assert.rejects(client.step({ image: new NdArray(new Uint8Array(4), [1, 2, 2]) }, [1, 1, 1]), TypeError);
print(await client.step(observe(3, 25), [1, 1, 1]));
print(await client.step(observe(3, 28), [1, 1, 1]));
await client.close(); // which sends the last step
