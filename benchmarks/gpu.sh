#!/usr/bin/env bash
# Everything that only an NVIDIA GPU can show, with one short table at the end:
# the tests, operators, ten training steps, the benchmark in three dtypes, decoding and its floor.
#
#     benchmarks/gpu.sh [FOLDER]      # logs and results; build/gpu when left out
#
# QUICK=1 takes a sample of the benchmark. It ends with 1 where there is no GPU, or a step failed.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
python=${PYTHON:-python}

if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "benchmarks/gpu.sh needs an NVIDIA GPU: nvidia-smi finds none" >&2
    exit 1
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "benchmarks/gpu.sh needs a PyTorch that finds the GPU; fx2relax doctor says why not" >&2
    exit 1
fi

export FX2RELAX_CUDA=1
mkdir -p "$out"
table=()
failed=0

step() { # NAME COMMAND...: run it, with its output in a log, and note how it ended
    local name=$1 begin=$SECONDS end
    shift
    echo "== $name" >&2
    if "$@" >"$out/$name.log" 2>&1; then end=ok; else end=FAILED failed=1; fi
    table+=("$(printf '%-12s %-6s %5d s  %s' "$name" "$end" $((SECONDS - begin)) \
        "$(grep -v '^[[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c -70)")")
}

tests() { "$python" -m pytest -q -p no:cacheprovider -n 1 -m cuda "$@"; }
quick=${QUICK:+--quick}

step doctor "$python" -c 'from fx2relax.cli import main; main()' doctor
step operators tests tests/test_cuda.py -k test_operator
step training tests tests/test_cuda.py -k test_ten_steps
step tests tests tests -k "not test_operator and not test_ten_steps"
for dtype in float32 float16 bfloat16; do
    rm -rf "${out:?}/$dtype"
    step "$dtype" "$python" -m benchmarks --device cuda --dtype "$dtype" --networks all \
        --kernels none $quick --no-cold --out "$out/$dtype"
done
step floor "$python" -m benchmarks.floor "$out/float32" "$out/float16" "$out/bfloat16"

echo
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
printf '%s\n' "${table[@]}"
cat "$out/floor.log"
exit $failed
