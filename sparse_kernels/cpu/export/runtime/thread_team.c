#define _GNU_SOURCE
#include "thread_team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Turns of waiting before a thread sleeps: longer than from one layer to the next. */
enum { SPINS = 3000, MOST_MEMBERS = 1024, LINE = 64 };

typedef struct {
    thread_team *team;
    int number;
    pthread_t thread;
    _Atomic uint64_t job_number; /* of the last job that this thread takes part in */
    _Atomic int sleeps;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} team_worker;

struct thread_team {
    /* The job; only its members read it, and only before they count down `unfinished`. */
    team_part function;
    void *job;
    int64_t parts;
    int shares; /* threads that share the parts */
    uint64_t job_number;
    _Atomic int unfinished, caller_sleeps, ended;
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int workers, processors;
    unsigned generation;
    team_worker *members[MOST_MEMBERS];
};

/* Forks on the way to this process. A number of the process would not do: systems give it again, and containers too. */
static atomic_uint forks;
static pthread_once_t counts_forks = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }

static void start_counting(void) { pthread_atfork(NULL, NULL, count_fork); }

static inline void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static int count_processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? MOST_MEMBERS : CPU_COUNT(&set);
}

/* Where members must share processors, who spins keeps another from its work. */
static int count_spins(const thread_team *team) { return team->shares <= team->processors ? SPINS : 0; }

thread_team *new_team(void) {
    pthread_once(&counts_forks, start_counting);
    thread_team *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->done, NULL);
    team->processors = count_processors();
    team->generation = atomic_load(&forks);
    return team;
}

static void run_share(thread_team *team, int number) {
    int64_t first = team->parts * number / team->shares, behind = team->parts * (number + 1) / team->shares;
    for (int64_t part = first; part < behind; part++) team->function(team->job, part);
}

static uint64_t await_job(team_worker *own, uint64_t seen, int spins) {
    uint64_t now;
    for (int i = 0; i < spins; i++) {
        if ((now = atomic_load_explicit(&own->job_number, memory_order_acquire)) != seen) return now;
        pause_briefly();
    }
    pthread_mutex_lock(&own->mutex);
    atomic_store(&own->sleeps, 1);
    while ((now = atomic_load(&own->job_number)) == seen) pthread_cond_wait(&own->wake, &own->mutex);
    atomic_store(&own->sleeps, 0);
    pthread_mutex_unlock(&own->mutex);
    return now;
}

static void wake_caller(thread_team *team) {
    pthread_mutex_lock(&team->mutex);
    pthread_cond_signal(&team->done);
    pthread_mutex_unlock(&team->mutex);
}

static void *work(void *given) {
    team_worker *own = given;
    thread_team *team = own->team;
    uint64_t seen = 0;
    for (int spins = 0;;) {
        seen = await_job(own, seen, spins);
        if (atomic_load(&team->ended)) return NULL;
        spins = count_spins(team);
        run_share(team, own->number);
        if (atomic_fetch_sub(&team->unfinished, 1) == 1 && atomic_load(&team->caller_sleeps)) wake_caller(team);
    }
}

static int start_worker(thread_team *team) {
    void *found = NULL;
    if (posix_memalign(&found, LINE, (sizeof(team_worker) + LINE - 1) / LINE * LINE)) return 0;
    team_worker *worker = found;
    worker->team = team;
    worker->number = team->workers + 1;
    atomic_init(&worker->job_number, 0);
    atomic_init(&worker->sleeps, 0);
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->wake, NULL);
    if (pthread_create(&worker->thread, NULL, work, worker)) {
        free(worker);
        return 0;
    }
    team->members[team->workers++] = worker;
    return 1;
}

/* Start threads until there are so many, or the system refuses one. */
static void start_workers(thread_team *team, int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the caller's */
    while (team->workers < wanted && start_worker(team)) continue;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Give a job to the first `count` threads. The others sleep on. */
static void announce(thread_team *team, int count) {
    team->job_number++;
    for (int i = 0; i < count; i++) {
        team_worker *worker = team->members[i];
        atomic_store(&worker->job_number, team->job_number);
        if (atomic_load(&worker->sleeps)) {
            pthread_mutex_lock(&worker->mutex);
            pthread_cond_signal(&worker->wake);
            pthread_mutex_unlock(&worker->mutex);
        }
    }
}

static void await_workers(thread_team *team) {
    for (int i = count_spins(team); i > 0; i--) {
        if (!atomic_load_explicit(&team->unfinished, memory_order_acquire)) return;
        pause_briefly();
    }
    pthread_mutex_lock(&team->mutex);
    atomic_store(&team->caller_sleeps, 1);
    while (atomic_load(&team->unfinished)) pthread_cond_wait(&team->done, &team->mutex);
    atomic_store(&team->caller_sleeps, 0);
    pthread_mutex_unlock(&team->mutex);
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
    announce(team, members - 1);
    run_share(team, 0);
    await_workers(team);
}

int is_own_team(const thread_team *team) { return team->generation == atomic_load(&forks); }

void end_team(thread_team *team) {
    if (!team) return;
    int own = is_own_team(team);
    if (own) {
        atomic_store(&team->ended, 1);
        announce(team, team->workers);
    }
    for (int i = 0; i < team->workers; i++) {
        if (own) pthread_join(team->members[i]->thread, NULL);
        free(team->members[i]);
    }
    free(team);
}
