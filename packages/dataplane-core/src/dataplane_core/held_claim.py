"""`held_claim`: a leased claim that is renewed while its samples are processed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataplane_core.arguments import checked_period
from dataplane_core.errors import LeaseLostError
from dataplane_core.meta import LEASE

if TYPE_CHECKING:
    from dataplane_core.client import DataPlaneClient
    from dataplane_core.meta import KVBatchMeta

_STOP_S = 5.0


@contextlib.contextmanager
def held_claim(
    client: DataPlaneClient, claim: KVBatchMeta, *, renew_every_s: float, acknowledge: bool = True
) -> Iterator[None]:
    """Renew a claim during the block, then acknowledge it; release it if the block raises.

    A claim without a lease is left as it is.

    Args:
        client: a thread-safe client, which renews, acknowledges and releases.
        claim: as `DataPlaneClient.claim_meta` returned it.
        renew_every_s: at most a third of ``claim_lease_s``, so that one late renewal loses nothing.
        acknowledge: False if the block acknowledges, by its last put for example.

    Raises:
        InvalidRequestError: (a ValueError) ``renew_every_s`` is not a number above 0; the block
            does not run, and the claim is left as it is.
        LeaseLostError: the lease expired or was ended during the block; the claim's samples may
            have another holder.
    """
    renew_every_s = checked_period("held_claim", "renew_every_s", renew_every_s)
    if LEASE not in claim.extra_info:
        yield
        return
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(renew_every_s):
            try:
                client.renew(claim)
            except LeaseLostError:
                return  # `acknowledge` reports it
            except Exception:  # noqa: BLE001, S112  # an adapter may raise anything
                continue  # the store is unavailable for now

    thread = threading.Thread(target=renew, name="renew claim", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:  # whatever ends the block, other consumers can claim at once
        ended.set()
        with contextlib.suppress(Exception):  # the block's error must reach the caller
            client.release(claim)
        raise
    else:
        ended.set()
        if acknowledge:
            client.acknowledge(claim)
    finally:
        thread.join(_STOP_S)
