"""People of one region: `python -m tests.bench.regional.asker URL` asks its gateway five times a second until standard input ends.

One line of JSON per answer ({"at", "took", "status", "id", "version", "tokens"}), and one per second with what `/health` says ({"at",
"health"}). RATCHET_KEY is the key.
"""

import json
import os
import sys
import threading
import time

import httpx

EVERY_S, HEALTH_S, TIMEOUT_S = 0.2, 1.0, 15.0


def ask(client: httpx.Client, number: int) -> dict[str, object]:
    """One answer, or what came instead."""
    body = {"model": "composer", "messages": [{"role": "user", "content": "Why?"}], "user": f"p-{number % 20}", "max_tokens": 8}
    began = time.time()
    try:
        reply = client.post("/v1/chat/completions", json={**body, "store": True})
        said = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        return {"at": began, "took": time.time() - began, "status": 0, "why": repr(error)}
    told: dict[str, object] = {"at": began, "took": time.time() - began, "status": reply.status_code}
    if reply.status_code != 200:
        return told | {"why": reply.text[:300]}
    return told | {"id": said["id"], "version": said["system_fingerprint"], "tokens": said["usage"]["completion_tokens"]}


def main() -> None:
    """See above."""
    stop, lock = threading.Event(), threading.Lock()

    def say(line: dict[str, object]) -> None:
        with lock:
            print(json.dumps(line), flush=True)

    def look() -> None:
        with httpx.Client(base_url=sys.argv[1], timeout=TIMEOUT_S, trust_env=False) as client:
            while not stop.wait(HEALTH_S):
                try:
                    say({"at": time.time(), "health": client.get("/health").json()})
                except (httpx.HTTPError, ValueError) as error:
                    say({"at": time.time(), "health": {"unreached": repr(error)}})

    def live() -> None:
        headers = {"authorization": f"Bearer {os.environ['RATCHET_KEY']}"}
        with httpx.Client(base_url=sys.argv[1], timeout=TIMEOUT_S, headers=headers, trust_env=False) as client:
            number = 0
            while not stop.wait(EVERY_S):
                say(ask(client, number))
                number += 1

    threads = [threading.Thread(target=act) for act in (look, live)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
