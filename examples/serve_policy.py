"""Serve the policy of a run over HTTP: POST an observation as JSON, and the answer is the action.

    python examples/serve_policy.py runs/PPO-CartPole-v1-20260101-120000
    curl -d '[0.0, 0.1, 0.0, -0.1]' http://127.0.0.1:8000

Who can reach the port can ask for actions: it listens on this machine only, unless --host says otherwise.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from corral import load_policy
from corral.errors import CorralError

MAX_BYTES = 10_000_000


def make_server(run_dir, host="127.0.0.1", port=8000):
    policy, one_at_a_time = load_policy(run_dir), threading.Lock()
    if policy.has_memory:
        raise CorralError(
            "the policy remembers earlier observations, and requests do not say to which episode they belong: "
            "keep the states of each client, which policy.act takes and returns"
        )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                num_bytes = int(self.headers.get("Content-Length", 0))
                if not 0 <= num_bytes <= MAX_BYTES:
                    raise ValueError(
                        f"an observation has at most {MAX_BYTES:,} bytes, and Content-Length says how many"
                    )
                observation = json.loads(self.rfile.read(num_bytes))
                with one_at_a_time:
                    self.answer(200, policy(observation))
            except (ValueError, RecursionError, CorralError) as error:  # no JSON, or no observation of the env
                self.answer(400, {"error": str(error)})

        def answer(self, status, value):
            body = json.dumps(value, default=lambda array: array.tolist()).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    return ThreadingHTTPServer((host, port), Handler)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="directory of a run or of a checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    try:
        server = make_server(options.run_dir, options.host, options.port)
    except (OSError, CorralError) as error:  # the port is in use, or there is no policy
        parser.exit(1, f"{options.host}:{options.port}, {options.run_dir}: {error}\n")
    with server:
        print(f"POST observations to http://{options.host}:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
