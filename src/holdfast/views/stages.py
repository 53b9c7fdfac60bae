"""Each stage in words that complete the sentence "the job ..."."""

from holdfast.control.history import Stage

MEANINGS = {
    Stage.USEFUL: "made progress",
    Stage.REPEATED: "made steps that it repeated after a restart",
    Stage.WARMUP: "ran its workers before their first step",
    Stage.DETECT: "had failed, but no agent knew yet",
    Stage.STOP: "stopped the workers",
    Stage.REGROUP: "waited until the nodes had formed a round",
    Stage.START: "started the processes of workers",
    Stage.END: "had no workers left",
}
