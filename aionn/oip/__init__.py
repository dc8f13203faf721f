"""The Open Inference Protocol (version 2 of KServe's) in front of compiled models: gRPC, and REST with binary tensors.

A door for clients that exist already (tritonclient, KServe, gateways); frames of the same machine go through a burst, which is
several times faster. ``aionn serve DEVICE --oip PORT --model FILE`` starts ``process`` beside the process of the device.

The layers, from bytes to executions: ``protobuf`` and ``grpc_messages`` or ``rest_messages`` (bytes), ``tensors`` (values),
``requests`` (the protocol without a transport), ``terms`` (deadline and priority), ``models``, ``door`` (admission, drain), and two
shells, ``grpc_server`` and ``rest_app`` with ``rest_server``. All but the shells are without I/O.

It imports the public surface of ``aionn`` alone, and nothing outside of this package imports gRPC.
"""
