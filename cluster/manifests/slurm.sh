# From here on the script is the same for every recipe and cluster.

if ((${#modules[@]})); then module load "${modules[@]}"; fi
# shellcheck source=/dev/null
if [[ -n $venv ]]; then source "$venv/bin/activate"; fi
set -u # modules and environments are not written for it

for name in "${passed[@]}"; do
    if [[ -z ${!name:-} ]]; then
        echo "sentray: $name is not set; set it where sbatch is called" >&2
        exit 2
    fi
done
cd -- "${SLURM_SUBMIT_DIR:?call sbatch with this script}"
if [[ ! -f $package ]]; then
    echo "sentray: there is no $package here; call sbatch in the folder of this script" >&2
    exit 2
fi

# What this start needs for itself, readable by its user only.
state="$PWD/state-${SLURM_JOB_ID:?}"
rm -rf -- "$state" # of the start before
(umask 077 && mkdir -- "$state")
python -m zipfile -e "$package" "$state/package"
python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$state/token"

# The batch script runs on the first node, and so will Ray's head.
read -r head _ < <(hostname -I)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$state/token"
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 # seconds; 30 are few on a shared disk

# A signal is handed to Sentray alone, not to Ray: the workers are needed until all is put away.
stopped=
again=
alive() { [[ -n $(jobs -pr) ]]; } # srun, and not another process with its old number
end() { kill -TERM "$(jobs -p)" 2>/dev/null || true; }
stop() {
    stopped=yes
    if [[ -s $state/code ]]; then
        return # it has ended
    elif [[ -s $state/pid ]]; then
        kill -TERM "$(<"$state/pid")" 2>/dev/null || true
    elif alive; then
        end
    fi
}
trap 'again=yes; stop' USR1 # the time is nearly up
trap stop TERM INT

# For the bash on the head, with the folder and the address.
run='
    export RAY_ADDRESS="$2"
    python "$1/package/start.py" &
    echo "$!" >"$1/pid"
    wait "$!" && code=0 || code=$?
    echo "$code" >"$1/code"
    exit "$code"
'
# The job's variables are set in its own process: they may have any name.
start() {
    set_variables
    export PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}"
    exec "${@:2}"
}
if [[ -z $stopped ]]; then
    # a node that is lost does not end the others
    start "$state/package" \
        srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --wait=0 --kill-on-bad-exit=0 \
        ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
        "${ray_options[@]}" -- bash -c "$run" run "$state" "$head:6379" &
fi
while alive && [[ ! -s $state/code ]]; do sleep 1; done
# Nodes leave when they miss the head, which takes Ray a minute or more.
for _ in {1..20}; do
    if alive; then sleep 1; fi
done
if alive; then end; fi
wait

# symmetric-run itself says 0 where Ray could not be started.
if [[ -s $state/code ]]; then
    code=$(<"$state/code")
elif [[ -n $stopped ]]; then
    code=75
else
    echo "sentray: Ray did not start, so nothing ran; what it said is above" >&2
    code=1
fi
rm -rf -- "$state"
if [[ $code == 75 && -n $again ]]; then
    echo "sentray: the time is up; queued again, to go on where it stopped"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
