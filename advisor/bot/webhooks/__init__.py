"""From a delivery to a task: authenticity, payloads, the durable queue, the server."""
