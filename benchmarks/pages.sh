#!/usr/bin/env bash
# Make the runs that the README and docs/benchmarks*.md show, and put their tables there:
#
#     benchmarks/pages.sh FOLDER
#
# Three hours on two cores, on which nothing else is to run. What the folder holds is not run again.
# Sentences between the tables that name figures are not changed.
# The blocks `other` are another machine's: what was run there is put into docs/benchmarks-more.md by
# `python -m benchmarks.pages other=FOLDER/full other-train=FOLDER/train other-none=FOLDER/none
# other-kernels=FOLDER/kernels` and its name.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."

networks=resnet18,resnet50,mobilenetv3,efficientnet-b0,convnext-tiny,unet,vit-small,bert,gpt2
networks+=,whisper-encoder,gpt2-decode,llama-decode,lstm,dlrm,mlp
inference="--networks $networks --kernels none"
sides="--sides eager,inductor,relax"
runs=()

run() {
    name=$1
    shift
    echo "$name: $(date)"
    python -m benchmarks "$@" --threads 2 --resume --out "$out/$name" > "$out/$name.log" 2>&1
    runs+=("$name=$out/$name")
}

mkdir -p "$out"
run full $inference --sides eager,dynamo,inductor,inductor-freezing,openvino,relax --rounds 5 --seconds 1
run kernels --networks none --kernels all $sides --batch 1 --rounds 7 --seconds 1
run call --networks none --kernels add-16 --sides eager,dynamo,inductor,relax --batch 1 --rounds 21 \
    --seconds 1 --no-cold
run train --train --networks resnet18,bert,gpt2 --kernels none $sides --no-cold --rounds 5 --seconds 16
run autocast-1 --autocast $inference $sides --no-cold --batch 1 --rounds 4 --seconds 0.6
run autocast-8 --autocast $inference $sides --no-cold --batch 8 --rounds 4 --seconds 0.6
run none $inference --sides relax --options library=none --no-cold --rounds 4 --seconds 1

python -m benchmarks.pages "${runs[@]}" README.md docs/benchmarks.md docs/benchmarks-more.md
cp "$out/full/results.json" docs/benchmarks/
