"""Messages that cross a thread or a process: requests, steps, outputs, reports. Plain structs, sent as msgpack."""
