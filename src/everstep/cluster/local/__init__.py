"""launcher=local: ranks that torchrun started, the lighthouse that replicas meet under, and `everstep up`, which starts them all."""
