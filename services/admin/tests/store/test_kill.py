"""Records answered with 200 survive a kill of the process."""

import signal
import threading

import httpx

TIMEOUT_S = 60.0


def test_everything_acknowledged_survives_a_kill(start, url, otlp):
    service = start("--db", url)
    acknowledged, killed = [], threading.Event()

    def send(number):
        with httpx.Client(base_url=service.url, timeout=TIMEOUT_S) as client:
            at_s = 0
            while True:
                at_s += 1
                sample_id = f"{number}-{at_s}"
                log = otlp.log("put", [sample_id], at_s=at_s, service=f"rollout {number}")
                headers = {"content-type": "application/x-protobuf"}
                try:
                    sent = client.post("/v1/logs", content=log.SerializeToString(), headers=headers)
                except httpx.HTTPError:
                    assert killed.is_set()
                    return
                assert sent.status_code == 200
                acknowledged.append(sample_id)
                if len(acknowledged) > 150:
                    enough.set()

    enough = threading.Event()
    senders = [threading.Thread(target=send, args=[number]) for number in range(8)]
    for sender in senders:
        sender.start()
    assert enough.wait(TIMEOUT_S)
    killed.set()
    service.stop(signal.SIGKILL)
    for sender in senders:
        sender.join(TIMEOUT_S)
    again = start("--db", url)
    with httpx.Client(base_url=again.url, timeout=TIMEOUT_S) as client:
        ids, query = [], {"limit": 1000}
        while query:
            page = client.get("/api/v1/samples", params=query).json()
            ids += [hit["sample_id"] for hit in page["samples"]]
            query = page["next"] and {"limit": 1000, "cursor": page["next"]}
    assert set(acknowledged) <= set(ids)
    assert len(ids) == len(set(ids))
