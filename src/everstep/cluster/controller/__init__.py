"""launcher=ray: what owns the coordinator and the workers, repairs replicas, lets ranks leave, and takes over from a dead
controller."""
