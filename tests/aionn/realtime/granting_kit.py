"""A service with RealtimeKit's name on a private bus: ``granting_kit.py ADDRESS HOW``. As root it really grants.

HOW: grant, refuse (every request), silent (never answers), low (grants priorities up to 2), nonsense (texts for numbers).
"""

from __future__ import annotations

import os
import sys

from jeepney import MessageType, message_bus, new_error, new_method_return
from jeepney.io.blocking import open_dbus_connection


def main() -> None:
    address, how = sys.argv[1:]
    with open_dbus_connection(address) as bus:
        bus.send_and_get_reply(message_bus.RequestName("org.freedesktop.RealtimeKit1"), timeout=10)
        print("ready", flush=True)
        while True:
            message = bus.receive()
            if message.header.message_type is not MessageType.method_call or how == "silent":
                continue
            if len(message.body) == 2:  # Properties.Get
                value = {"MaxRealtimePriority": 2 if how == "low" else 20, "RTTimeUSecMax": 200_000}[
                    message.body[1]
                ]
                answer = ("s", "many") if how == "nonsense" else ("x", value)
                bus.send(new_method_return(message, "v", (answer,)))
            elif how == "refuse":
                bus.send(new_error(message, "org.freedesktop.DBus.Error.AccessDenied", "s", ("not today",)))
            else:
                _, tid, priority = message.body
                os.sched_setscheduler(tid, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
                bus.send(new_method_return(message))


if __name__ == "__main__":
    main()
