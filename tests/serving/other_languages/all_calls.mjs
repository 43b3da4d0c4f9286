// Makes each call of the client once; the test says what must arrive, and answers.
import assert from "node:assert/strict";

import { ClientError, EpisodesLost, NdArray, PolicyClient } from "../../../clients/javascript/corral_client.mjs";

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

const tls = process.env.CERTIFICATES ?? null;
const client = await PolicyClient.connect(process.argv[2], { numEnvs: 3, name: "all calls", token: "a token", tls });
assert.equal(client.observationSpace.type, "Dict");
let actions = await client.begin(observe(3, 0));
assert.deepEqual(actions.move.numbers(), [0.5, 1.5, 2.5]);
assert.deepEqual(actions.move.row(1).numbers(), [1.5]);
assert.deepEqual(actions.turn.numbers(), [0, 1, 2]);
assert.equal(client.weightsVersion, 7);
actions = await client.step(observe(2, 3), [1.5, -2], { envs: [2, 0] });
assert.deepEqual(actions.turn.numbers(), [2, 0]);
actions = await client.step(observe(3, 5), [1, 2, 3], { terminated: [false, true, false], truncated: [false, true, true] });
assert.deepEqual(actions.turn.numbers(), [0]);
await client.begin(observe(2, 8), [1, 2]);
actions = await client.step(observe(3, 10), [4, 5, 6], {
  terminated: [true, false, false],
  truncated: [false, false, true],
  nextObs: observe(3, 13),
});
assert.deepEqual(actions.turn.numbers(), [0, 1, 2]);
actions = await client.exchange({
  envs: [0, 1],
  obs: observe(2, 16),
  actions: { move: new NdArray(Float32Array.of(9, 8), [2, 1]), turn: new NdArray(BigInt64Array.of(2n, 1n), [2]) },
  infos: [{ note: "é", level: 3, big: -5000000000 }, { list: [true, 0.5, null] }],
});
assert.deepEqual(actions.turn.shape, [0]);
await client.ping();
await client.drop([1]);
await assert.rejects(
  client.step(observe(2, 18), [1, 1], { envs: [0, 1] }),
  (error) => error instanceof ClientError && error.code === "protocol",
);
await assert.rejects(client.begin(observe(3, 0)), EpisodesLost);
await client.begin(observe(3, 0));
await assert.rejects(async () => client.step(observe(2, 0), [1, 1]), TypeError);
const first = client.step(observe(3, 3), [1, 1, 1]);
await assert.rejects(client.drop(), TypeError); // one message at a time
await first;
client.close();
