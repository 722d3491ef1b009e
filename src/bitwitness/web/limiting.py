"""How often something may be tried: pure arithmetic on a clock that is given, for sign-ins."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

_MOST = 10_000


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Buckets:
    """A bucket of tries a key: `burst` at once, and another one each `seconds`.

    Keys come from whoever asks, so the number of them is bounded; what is forgotten is the bucket that was used longest ago.
    """

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst, self._seconds = float(burst), seconds
        self._buckets: OrderedDict[object, _Bucket] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: object, now: float) -> float:
        """Take a try; 0 if there was one, else the seconds until there is."""
        with self._lock:
            bucket = self._filled(key, now)
            if bucket.left >= 1:
                bucket.left -= 1
                return 0.0
            return (1 - bucket.left) * self._seconds

    def give_back(self, key: object, now: float) -> None:
        """It has not been a try after all."""
        with self._lock:
            bucket = self._filled(key, now)
            bucket.left = min(self._burst, bucket.left + 1)

    def _filled(self, key: object, now: float) -> _Bucket:
        bucket = self._buckets.setdefault(key, _Bucket(self._burst, now))
        bucket.left = min(self._burst, bucket.left + max(0.0, now - bucket.at) / self._seconds)
        bucket.at = now
        self._buckets.move_to_end(key)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        return bucket
