#!/usr/bin/env bash
# Runs a Slurm of two nodes on this machine, to try and to test jobs.
#
#   eval "$(scripts/slurm_here.sh start)"   starts it, and sets SLURM_CONF in this shell
#   scripts/slurm_here.sh status            prints whether it is running
#   scripts/slurm_here.sh stop              cancels its jobs and ends what `start` started, by process id
#
# All its files are in one folder (AUTOACCUM_SLURM, by default /var/tmp/autoaccum-slurm), including the key and the socket
# of its munge; an existing Slurm on the machine is not changed. It listens on loopback by address only, without a
# firewall, so use it on a machine of your own. `start` installs Debian's slurm-wlm and munge if they are missing, which
# requires root; so does Slurm itself, which starts jobs as their users.
#
# There are no cgroups, as in most containers: a job's memory is checked once a second, and a job that exceeds its
# request is killed. Each node is a slurmd of its own (`slurmd -N`); they have the files and the memory of this machine in
# common. A node's name is its address, so that it can be resolved, as torchrun's rendezvous requires.
set -euo pipefail

state="${AUTOACCUM_SLURM:-/var/tmp/autoaccum-slurm}"
export SLURM_CONF="$state/slurm.conf"
PATH="$PATH:/usr/sbin:/sbin"
# Tasks a node runs at once, whatever its cores, so that tests do not wait for each other.
cpus=32
nodes="127.0.0.1 127.0.0.2"

say() { echo "slurm_here: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

install_slurm() {
    if command -v slurmctld slurmd munged sbatch >/dev/null; then return; fi
    [ "$(id -u)" = 0 ] || fail "slurm-wlm and munge are not installed, and only root can do that"
    command -v apt-get >/dev/null || fail "slurm-wlm and munge are not installed, and there is no apt-get"
    say "installing slurm-wlm and munge"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; } >&2 ||
        fail "slurm-wlm and munge could not be installed"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

configure() {
    local host memory node
    host="$(hostname -s)"
    memory="$(awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo)"
    mkdir -p "$state/spool" "$state/jobs" "$state/log"
    chmod 755 "$state"
    [ -f "$state/munge.key" ] || head -c 1024 /dev/urandom >"$state/munge.key"
    chmod 400 "$state/munge.key"
    : >"$state/plugstack.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=autoaccum
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CredType=cred/munge
PlugStackConfig=$state/plugstack.conf
StateSaveLocation=$state/jobs
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
# Short intervals, because users of this script wait for it.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=5
# Whoever submitted a job may ask for it as long as this runs.
MinJobAge=1000000
OverTimeLimit=0
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=here Nodes=ALL Default=YES DefaultTime=10 DefMemPerNode=2048 MaxTime=INFINITE OverSubscribe=FORCE:4 PreemptMode=OFF State=UP
# Jobs of "low" are preempted by those of "urgent".
PartitionName=low Nodes=ALL DefaultTime=10 DefMemPerNode=1024 PriorityTier=1 GraceTime=60 OverSubscribe=NO State=UP
PartitionName=urgent Nodes=ALL DefaultTime=10 DefMemPerNode=1024 PriorityTier=10 OverSubscribe=NO PreemptMode=OFF State=UP
CONF
    for node in $nodes; do
        echo "NodeName=$node NodeAddr=$node Port=$(free_port) CPUs=$cpus CoresPerSocket=$cpus ThreadsPerCore=1" \
            "RealMemory=$memory State=UNKNOWN" >>"$SLURM_CONF"
    done
}

# The process named in a file, if it is still the one started; its id may have been reused.
alive() {
    local file="$state/$1.pid" pid
    [ -s "$file" ] || return 1
    pid="$(cat "$file")"
    # Where nobody waits for it (a container's first process may not), a process that has ended stays as a zombie.
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${1%%-*}" ] && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null
}

daemons="${nodes//127/slurmd-127} slurmctld munged"

all_alive() {
    local name
    for name in $daemons; do alive "$name" || return 1; done
}

is_up() {
    local states
    all_alive && states="$(timeout 10 sinfo --noheader --Format=StateCompact 2>/dev/null)" && [ -n "$states" ] &&
        ! grep -qvE '^(idle|mix|alloc|comp) *$' <<<"$states"
}

start() {
    install_slurm
    [ "$(id -u)" = 0 ] || fail "Slurm starts jobs as their users, which takes root"
    if ! is_up; then
        end_all
        configure
        munged --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munged.pid" \
            --seed-file="$state/munge.seed" --log-file="$state/log/munged.log" --force >&2 ||
            fail "munged did not start; see $state/log/munged.log"
        slurmctld -c >&2 || fail "slurmctld did not start; see $state/log/slurmctld.log"
        for node in $nodes; do
            mkdir -p "$state/spool/$node"
            slurmd -N "$node" >&2 || fail "slurmd did not start; see $state/log/slurmd-$node.log"
        done
        for _ in $(seq 150); do
            if is_up; then break; fi
            sleep 0.2
        done
        is_up || fail "the nodes did not come up in 30 s; see $state/log"
    fi
    say "running; its folder is $state"
    echo "export SLURM_CONF=$SLURM_CONF"
}

end_all() {
    if all_alive; then
        timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
        for _ in $(seq 100); do  # until what runs in jobs has ended: only slurmd can do that
            [ -n "$(timeout 10 squeue --noheader 2>/dev/null || true)" ] || break
            sleep 0.2
        done
    fi
    for name in $daemons; do
        if alive "$name"; then
            kill "$(cat "$state/$name.pid")" 2>/dev/null || true
            for _ in $(seq 100); do
                alive "$name" || break
                sleep 0.1
            done
            if alive "$name"; then kill -KILL "$(cat "$state/$name.pid")" 2>/dev/null || true; fi
        fi
        rm -f "$state/$name.pid"
    done
}

case "${1:-}" in
start) start ;;
stop)
    end_all
    say "stopped"
    ;;
status)
    if is_up; then say "running; its folder is $state"; else fail "not running"; fi
    ;;
*) fail "say start, stop or status" ;;
esac
