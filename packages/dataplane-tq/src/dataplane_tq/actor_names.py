"""Names by which the actors of a TransferQueue are found in a Ray cluster."""

NAMESPACE = "transfer_queue"
CONTROLLER = "TransferQueueController"
DIRECTORY = "DataPlaneDirectory"
