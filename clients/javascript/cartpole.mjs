// Plays episodes of CartPole with the actions of a policy server, until the training is over.
//
//     corral serve --config cartpole.yaml --port 5555 &
//     node cartpole.mjs 127.0.0.1:5555
//
// Its arguments are the address, the number of envs (8) and a seed (0). The token, if the server asks for one, is in the
// environment variable CORRAL_TOKEN. The last line that it prints is the number of env steps.
//
// With a module that has the function `loadModel`, it chooses the actions itself, by the policy that the server sends:
//
//     npm install onnxruntime-node
//     LOADER=./onnxruntime_loader.mjs node cartpole.mjs 127.0.0.1:5555

import { ClientError, EpisodesLost, NdArray, PolicyClient, ServerStopped } from "./corral_client.mjs";

const MAX_STEPS = 500;

/** Return a function that gives uniform numbers from 0 to 1, by xorshift; Math.random has no seed. */
function seededRandom(seed) {
  let state = (0x9e3779b9 ^ seed) | 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
}

/** The pole on a cart of Barto, Sutton and Anderson (1983), with the constants of Gymnasium's CartPole-v1. */
class CartPole {
  constructor(random) {
    this.random = random;
  }

  reset() {
    [this.x, this.speed, this.angle, this.turn] = Array.from({ length: 4 }, () => 0.1 * this.random() - 0.05);
    this.numSteps = 0;
  }

  step(toTheRight) {
    const gravity = 9.8, cartMass = 1.0, poleMass = 0.1, halfLength = 0.5, tauS = 0.02;
    const mass = cartMass + poleMass;
    const force = toTheRight ? 10 : -10;
    const cosine = Math.cos(this.angle), sine = Math.sin(this.angle);
    const push = (force + poleMass * halfLength * this.turn ** 2 * sine) / mass;
    const turnRate = (gravity * sine - cosine * push) / (halfLength * (4 / 3 - (poleMass * cosine ** 2) / mass));
    const acceleration = push - (poleMass * halfLength * turnRate * cosine) / mass;
    this.x += tauS * this.speed;
    this.speed += tauS * acceleration;
    this.angle += tauS * this.turn;
    this.turn += tauS * turnRate;
    this.numSteps += 1;
  }

  get hasFallen() {
    return Math.abs(this.x) > 2.4 || Math.abs(this.angle) > (12 * Math.PI) / 180;
  }

  get isOutOfTime() {
    return this.numSteps >= MAX_STEPS;
  }
}

function observe(envs) {
  return new NdArray(Float32Array.from(envs.flatMap((env) => [env.x, env.speed, env.angle, env.turn])), [envs.length, 4]);
}

/** Play until the training is over, or the server has lost the episodes. */
async function play(client, envs, counts) {
  envs.forEach((env) => env.reset());
  const rewards = envs.map(() => 1);
  let actions = await client.begin(observe(envs));
  for (;;) {
    actions.numbers().forEach((action, index) => envs[index].step(action === 1));
    counts.envSteps += envs.length;
    const obs = observe(envs);
    const terminated = envs.map((env) => env.hasFallen);
    const truncated = envs.map((env) => env.isOutOfTime);
    envs.filter((_, index) => terminated[index] || truncated[index]).forEach((env) => env.reset());
    actions = await client.step(obs, rewards, { terminated, truncated, nextObs: observe(envs) });
  }
}

const [address, numEnvs = "8", seed = "0"] = process.argv.slice(2);
if (address === undefined) {
  console.error("usage: node cartpole.mjs ADDRESS [NUM_ENVS [SEED]]");
  process.exit(2);
}
const counts = { envSteps: 0 };
const random = seededRandom(Number(seed));
const envs = Array.from({ length: Number(numEnvs) }, () => new CartPole(random));
const loader = process.env.LOADER ? await import(process.env.LOADER) : null;
let client = null;
try {
  client = await PolicyClient.connect(address, {
    numEnvs: envs.length,
    name: "cartpole.mjs",
    token: process.env.CORRAL_TOKEN ?? null,
    loadModel: loader?.loadModel ?? null,
    seed: Number(seed),
  });
  for (;;) {
    try {
      await play(client, envs, counts);
    } catch (error) {
      if (!(error instanceof EpisodesLost)) throw error;
      console.error(`${error.message} All envs begin new episodes.`);
    }
  }
} catch (error) {
  if (!(error instanceof ClientError)) throw error;
  const isOver = error instanceof ServerStopped;
  console.error(isOver ? error.message : `error ${error.code}: ${error.message}`);
  process.exitCode = isOver ? 0 : 1;
} finally {
  await client?.close();
}
console.log(counts.envSteps);
