#!/usr/bin/env bash
# torchrun on several nodes. Start it on every node, from the same folder, with the program and its arguments:
#
#     MASTER_ADDR=10.0.0.1 NUM_NODES=2 NODE_RANK=0 recipes/launch/torchrun.sh train.py --lr 1e-3    # first node
#     MASTER_ADDR=10.0.0.1 NUM_NODES=2 NODE_RANK=1 recipes/launch/torchrun.sh train.py --lr 1e-3    # second node
#
# Without arguments it trains recipes/launch/train.yaml. A rank that dies ends all others, and the agents of all nodes start
# them again, MAX_RESTARTS times; with AutoResume in the program it goes on from the newest intact checkpoint.
#
# To edit, or to set when you call it:
#   MASTER_ADDR     address or name of the first node; the others must reach its port MASTER_PORT, and all nodes each other
#   NUM_NODES       how many nodes there are
#   NODE_RANK       0 on the first node, which keeps the store of all agents
#   RANKS_PER_NODE  "gpu": one for each GPU; a number on CPUs
#   LOCAL_ADDR      address of this node, if the others do not find it by its host name
#   INTERFACE       network device between the nodes, if there are several: see `ip -brief address`
set -euo pipefail

: "${MASTER_ADDR:?is not set: the address or name of the first node}" "${NODE_RANK:?is not set: 0 on the first node}"
NUM_NODES=${NUM_NODES:-2}
RANKS_PER_NODE=${RANKS_PER_NODE:-gpu}
if [[ -n ${INTERFACE:-} ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

launcher=(
    "${PYTHON:-python3}" -m torch.distributed.run
    --nnodes "$NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "${MAX_RESTARTS:-3}"
    # c10d, since only with it do the agents of all nodes restart together. The id must be equal on all nodes.
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id "${JOB_ID:-muon}"
    --rdzv-conf "is_host=$([[ $NODE_RANK == 0 ]] && echo true || echo false)"
)
if [[ -n ${LOCAL_ADDR:-} ]]; then
    launcher+=(--local-addr "$LOCAL_ADDR")
fi
if [[ $# == 0 ]]; then
    set -- -m lightning_muon fit --config recipes/launch/train.yaml --trainer.num_nodes "$NUM_NODES"
    if [[ $RANKS_PER_NODE != gpu ]]; then
        set -- "$@" --trainer.accelerator cpu --trainer.devices "$RANKS_PER_NODE"
    fi
fi
exec "${launcher[@]}" "$@"
