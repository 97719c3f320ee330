"""What is on every node beside the ranks: their progress pages, and the agent that watches ranks and machine.

    page      a rank's record of where it is, in memory that the node can read whatever becomes of the rank
    beat      who keeps the page alive: a thread of the rank, and on CUDA the device's own answers
    senses    kernel log, NVML, memory, disks, network links of the machine; what is new, what is over
    verdict   why a rank does not move: its process, its device, or a collective (pure)
    agent     one process of each node, which looks, writes down what it finds, and tells the coordinator
    channel   its connection to the coordinator, which may be gone for a while
"""
