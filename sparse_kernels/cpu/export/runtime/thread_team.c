#define _GNU_SOURCE
#include "thread_team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* Turns of waiting before a thread sleeps: some 50 microseconds, longer than from one layer to the next. */
enum { SPINS = 3000, MOST_MEMBERS = 1024, ENDED = 0xFFFF };

struct thread_team {
    /* The number of the job, times 65536, plus its members. Who is no member reads nothing else of a job. */
    _Atomic uint64_t job_number;
    _Atomic int unfinished, sleeping;
    team_part function;
    void *job;
    int64_t parts;
    int shares; /* threads that share the parts */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int workers;
    pid_t process;
    pthread_t threads[MOST_MEMBERS];
};

typedef struct { thread_team *team; int number; uint64_t seen; } team_worker;

static inline void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

thread_team *new_team(void) {
    thread_team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    team->process = getpid();
    return team;
}

static void run_share(thread_team *team, int number) {
    int64_t first = team->parts * number / team->shares, behind = team->parts * (number + 1) / team->shares;
    for (int64_t part = first; part < behind; part++) team->function(team->job, part);
}

static uint64_t await_job(thread_team *team, uint64_t seen) {
    uint64_t now;
    for (int i = 0; i < SPINS; i++) {
        if ((now = atomic_load_explicit(&team->job_number, memory_order_acquire)) != seen) return now;
        pause_briefly();
    }
    pthread_mutex_lock(&team->mutex);
    atomic_fetch_add(&team->sleeping, 1);
    while ((now = atomic_load(&team->job_number)) == seen) pthread_cond_wait(&team->wake, &team->mutex);
    atomic_fetch_sub(&team->sleeping, 1);
    pthread_mutex_unlock(&team->mutex);
    return now;
}

static void *work(void *given) {
    team_worker own = *(team_worker *)given;
    free(given);
    for (;;) {
        own.seen = await_job(own.team, own.seen);
        int members = (int)(own.seen & 0xFFFF);
        if (members == ENDED) return NULL;
        if (own.number >= members) continue;
        run_share(own.team, own.number);
        atomic_fetch_sub_explicit(&own.team->unfinished, 1, memory_order_release);
    }
}

/* Start threads until there are so many, or the system refuses one. */
static void start_workers(thread_team *team, int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's */
    while (team->workers < wanted) {
        team_worker *worker = malloc(sizeof *worker);
        if (!worker) break;
        *worker = (team_worker){team, team->workers + 1, atomic_load(&team->job_number)};
        if (pthread_create(&team->threads[team->workers], NULL, work, worker)) {
            free(worker);
            break;
        }
        team->workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void announce(thread_team *team, int members) {
    uint64_t number = (atomic_load(&team->job_number) >> 16) + 1;
    atomic_store(&team->job_number, number << 16 | (uint64_t)members);
    if (atomic_load(&team->sleeping)) {
        pthread_mutex_lock(&team->mutex);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->mutex);
    }
}

void run_team(thread_team *team, int members, team_part function, void *job, int64_t parts) {
    if (members > parts) members = (int)parts;
    if (members > MOST_MEMBERS) members = MOST_MEMBERS;
    if (members - 1 > team->workers) start_workers(team, members - 1);
    if (members > team->workers + 1) members = team->workers + 1;
    if (members <= 1) {
        for (int64_t part = 0; part < parts; part++) function(job, part);
        return;
    }
    team->function = function;
    team->job = job;
    team->parts = parts;
    team->shares = members;
    atomic_store(&team->unfinished, members - 1);
    announce(team, members);
    run_share(team, 0);
    for (int i = 0; atomic_load_explicit(&team->unfinished, memory_order_acquire); i++) {
        if (i < SPINS) pause_briefly();
        else sched_yield();
    }
}

int is_own_team(const thread_team *team) { return team->process == getpid(); }

void end_team(thread_team *team) {
    if (!team) return;
    if (is_own_team(team)) {
        announce(team, ENDED);
        for (int i = 0; i < team->workers; i++) pthread_join(team->threads[i], NULL);
        pthread_cond_destroy(&team->wake);
        pthread_mutex_destroy(&team->mutex);
    }
    free(team);
}
