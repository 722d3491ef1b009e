"""Who is counted as one client, where each may have only so much of something: connections, tries, downloads."""

from __future__ import annotations

import ipaddress


def network(client: str) -> str:
    """Who is counted as one client: an address, and of IPv6 the part that one owner has all of."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
