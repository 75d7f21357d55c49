#!/bin/bash
( export CUDA_VISIBLE_DEVICES=1
  timeout -s INT 140 python benchmarks/cold_start.py meta-llama/Llama-3.1-8B --limit 100 --json $OUT/x/cold_start.json > $OUT/x/cold_start.log 2>&1
  echo "cold rc $? at $SECONDS"; tail -4 $OUT/x/cold_start.log ) &
c=$!
export CUDA_VISIBLE_DEVICES=0
OMP_NUM_THREADS=1 timeout -s INT 125 python -m pytest @runC.ids -v -n 13 --tb=short -p no:cacheprovider -p no:benchmark -o faulthandler_timeout=60 -m gpu --maxschedchunk 1 > $OUT/tests.log 2>&1
echo "tests rc $? at $SECONDS"; grep -E "^FAILED|^ERROR" $OUT/tests.log | cut -c1-200 | sort -u; grep -c PASSED $OUT/tests.log
wait $c
unset CUDA_VISIBLE_DEVICES
python benchmarks/on_gpus.py runC.txt --gpus 0,0,1,1 --limit $((LIMIT - SECONDS)) --out $OUT/m > $OUT/x/on_gpus.log 2>&1
cat $OUT/x/on_gpus.log | tail -12; rm -rf $OUT/m
tar -czf $OUT/x.tar.gz -C $OUT x; rm -rf $OUT/x
